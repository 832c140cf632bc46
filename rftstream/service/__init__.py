"""What runs a role: the only service loops, and what they need of the log.

In the order of reading:

    role, role_spec         what a role is to the loop, and its declaration
    service                 the loop's common part: start, stop, and what an error means
    single, concurrent      the loop of a role with one holder, and of a role in many processes
    in_force, control_view  which records count, and what the run should do now
    restore_partials        what former owners of a partition saved, read before its work is begun
    tracker                 which records of a partition are finished, when they finish in any order

To add a role, write no loop: declare a RoleSpec in a folder of `rftstream.roles` (docs/extending.md).
"""
