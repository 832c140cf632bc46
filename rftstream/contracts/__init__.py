"""What stands on the log: the messages of each stage, and the rules that every reader may rely on.

In the order of reading:

    role_names, ids                  the names of roles; ids and seeds, which are derived and never drawn
    arrays, tasks, rollouts, verdicts, batches, outcomes, versions
                                     the messages in the order of the flow, from a problem to trained weights
    control, demonstrations, dead, feedback
                                     the messages beside the flow
    messages                         the table of all messages, by the name of their contract
    topics                           the table of topics: who writes what where, with which key
    rules                            what a message promises beyond the types of its fields
    records, codec                   a record of the log, and the way from a message to a record and back

To add a message: write its class in the module of its stage, with a line under each field; add it to `messages`, to
its topic in `topics`, and its key to `codec`; run `schemas/generate.py`, and add a golden sample (docs/extending.md).
"""
