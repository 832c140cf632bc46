"""What runs a role: the only service loops, and what they need of the log.

In the order of reading:

    role, role_spec         what a role is to its loop, and its declaration
    service                 what the two loops share: how a worker is driven, and what an error means
    loops.commit            writing transactions, and what is done when the result of a commit is unknown
    loops.concurrent        the loop of a role in many processes; with it
        owned_partitions    the partitions that a worker owns, which of their records are finished, what former owners
                            saved, and what is done where somebody else has set the positions
        tracker             how positions say that records are finished in any order
        results             what is finished or saved, until it is on the log
    loops.single            the loop of a role with one holder; with it
        role_claim          who holds the role
        single_reader       reading by position, `control` first
        dead_letters        records that nobody can deal with
    records.in_force, control_view  which records count, and what the run should do now
    records.losses          what was deleted without a word

To add a role, write no loop: declare a RoleSpec in a folder of `rftstream.roles` (docs/extending.md).
"""
