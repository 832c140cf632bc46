"""A run on disk and on the log.

In the order of reading:

    folder, manifest              the run folder, and the record that defines the run
    making.create, ending         how a run is made, and how its sessions end
    services, modules             what its roles are told of it, and the user's modules that it makes use of
    making.fork, making.init_from, making.imported  runs that begin with another run's settings, weights or records
    roll_back, delete             how a run goes back to a checkpoint, and how it is removed
    observer, writes.requests     what can be seen of a run on its log, and what can be asked of it there
    published, writes.load_demonstrations
                                  its versions as model folders, and demonstrations that are added to it

To add an operation on runs: a module here that returns data, and a command in `rftstream.commands`.
"""
