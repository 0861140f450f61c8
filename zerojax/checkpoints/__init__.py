"""Training state on disk, as logical arrays that restore into any mesh, stage or number of devices.

Knows `TrainState` and layouts; hands on `save`, `restore` and `CheckpointManager`.

What is promised, and the test that holds it (tests/checkpoints/test_nothing_is_lost.py and test_manager.py):

| what happens | what is promised | test |
|---|---|---|
| killed while saving | the last one is complete; of one being replaced, old or new | wherever_a_replacement_is_killed |
| full disk, failing save | one error; nothing is left behind, the last is kept | a_save_that_fails_leaves_nothing |
| overwrite=True by mistake | only a checkpoint of `save` is replaced | only_a_checkpoint_of_its_own_is_replaced |
| file lost or cut | one error that names the array and the complete steps | a_damaged_step_is_one_short_error |
| flipped bit | one error: the checksum of the leaf | no_flipped_bit_comes_back |
| damaged latest step | the manager takes the one before and says so | a_damaged_latest_step_falls_back |
| killed at any step | the run goes on bit for bit from the last saved one | a_run_that_was_killed_anywhere |
| stop (SIGTERM) | the step in hand is saved, then status 75 | a_job_that_is_told_to_stop_saves, hosts/ |
| a process or node is lost | the others end within the heartbeat (30 s); fewer go on | hosts/test_lost_process.py |
| processes differ in path, step or folder | one error on all | hosts/test_agreement.py |
| newer checkpoint | one error that says so | a_checkpoint_of_a_newer_version |
"""
