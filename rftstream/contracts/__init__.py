"""The content of the log: the messages of each stage, and the rules on which every reader may rely.

In the order of reading:

    role_names, ids                  the names of roles; ids and seeds, which are derived and never drawn
    arrays, tasks, rollouts, verdicts, batches, outcomes, versions
                                     the messages in the order of the flow, from a problem to trained weights
    control, demonstrations, dead, feedback, questions
                                     the messages beside the flow
    message_spec, ranges, rules      how a message is declared: `@message`, the ranges of its fields, its rule
    messages                         the table of all messages, by the name of their contract
    topics                           the table of topics: how each is partitioned and kept
    checks                           the check of a whole message, composed of the rules and the types
    records, codec                   a record of the log, and the way from a message to a record and back

To add a message: write its class below `@message` in the module of its stage (a new module joins `messages`), name its
topic in `topics`, and add a sample (docs/extending.md). A test says which of these is missing.
"""
