"""Training state on disk, as logical arrays that restore into any mesh, stage or number of devices.

Knows `TrainState` and layouts; hands on `save` and `restore`. What is promised, and the test that holds it
(tests/checkpoints/test_nothing_is_lost.py):

| what happens | what is promised | test |
|---|---|---|
| killed while saving | the last one is whole; of one being replaced, old or new | wherever_a_replacement_is_killed |
| full disk, failing save | one error; nothing is left behind, the last is kept | a_save_that_fails_leaves_nothing |
| overwrite=True by mistake | only a checkpoint of `save` is replaced | only_a_checkpoint_of_its_own_is_replaced |
| file lost or cut | one error that names the array and the whole steps | a_damaged_step_is_one_short_error |
| flipped bit | one error: the checksum of the leaf | no_flipped_bit_comes_back |
| newer checkpoint | one error that says so | a_checkpoint_of_a_newer_version |
"""
