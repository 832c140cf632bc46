"""The service loops that run roles, and their access to the log.

In the order of reading:

    role, role_spec         the interface between a role and its loop, and the declaration of a role
    service                 the common part of both loops: how a worker is driven, and how errors are handled
    loops.commit            writing transactions, and resolving a commit with an unknown result
    loops.concurrent        the loop of a role in many processes; with it
        owned_partitions    the partitions of a worker: which records are finished, the saved work of former owners, and
                            positions that somebody else has set
        tracker             how positions encode that records finish in any order
        results             finished or saved results that are not on the log yet
    loops.single            the loop of a role with one holder; with it
        role_claim          which process holds the role
        single_reader       reading by position, `control` first
        dead_letters        records that cannot be processed
    records.in_force, control_view  which records count, and what the run should do now
    records.losses          records that were deleted without a record of it

To add a role, write no loop: declare a RoleSpec in a folder of `rftstream.roles` (docs/extending.md).
"""
