"""Training state on disk, as logical arrays that restore into any mesh, stage or number of devices.

Knows `TrainState` and layouts; hands on `save`, `restore` and `CheckpointManager`.

What is promised, and the test that holds it (tests/checkpoints/test_nothing_is_lost.py, test_manager.py and
test_step_folder.py):

| what happens | what is promised | test |
|---|---|---|
| killed while saving | the last one is complete; of one being replaced, old or new | wherever_a_replacement_is_killed |
| full disk, failing save | one error; nothing is left behind, the last is kept | a_save_that_fails_leaves_nothing |
| overwrite=True by mistake | only a checkpoint of `save` is replaced | only_a_checkpoint_of_its_own_is_replaced |
| full disk in the background | the same error, on all processes | a_disk_that_is_full_while_training |
| kill while an old step is deleted | no half step is left | a_deletion_that_is_killed |
| two jobs on one folder | the one that started first ends | of_two_jobs_that_save_into_one_folder |
| run not resumed, or from an older step | what is newer is kept aside | a_run_that_does_not_go_on |
| links, read-only folder | followed; reading writes nothing | links_are_followed, restoring_writes_nothing |
| killed on an object store (gs://) | as on a disk, without renaming | tests/checkpoints/test_object_store.py |
| file lost or cut | one error that names the array and the complete steps | a_damaged_step_is_one_short_error |
| flipped bit | one error: the checksum of the leaf | no_flipped_bit_comes_back |
| damaged latest step | the manager takes the one before and says so | a_damaged_latest_step_falls_back |
| killed at any step | the run goes on bit for bit from the last saved one | a_run_that_was_killed_anywhere |
| stop (SIGTERM, also twice) | the step in hand is saved, then status 75 | a_job_that_is_told_to_stop, hosts/ |
| a process is killed or hangs | the others end within the heartbeat (30 s) | hosts/test_lost_process.py |
| a node is lost | the supervisor of the examples goes on with the others | hosts/test_lost_process.py |
| processes differ in path, step or folder | one error on all | hosts/test_agreement.py |
| newer checkpoint | one error that says so | a_checkpoint_of_a_newer_version |

What grows with P processes and L leaves (counted, tests/hosts/test_agreement.py): a save or restore makes three or four
agreements, each P - 1 texts of 1 kB at process 0 and two messages elsewhere (P = 4096: at most 16 MB in all);
beside the arrays lies one JSON file of about 150 bytes a leaf, and as many positions of data as processes gave
different ones (4096 of 100 bytes: 0.4 MB; at most 64 MiB), which every process reads once when it restores.
Each process writes and reads its own slices alone; Orbax merges the P directories of what they wrote on process 0, and
its own barriers are a few messages of each process.
"""
