"""How a run is started and kept going: plan -> session -> supervisor -> host -> role.

In the order of reading:

    start                   `run`, `resume` and `create`: a run is planned (preflight/plan), and begun or gone on with
    session, result         from the start of its processes to the end of the last of them, under the run's lock
    supervisor, processes   the processes of all roles: started, watched, and started again when they die
    zygote                  a process with the imports done, from which they are forked
    host                    a process of one role: its port, signals and limits, and the loop round the service
    display.progress, health, logging, targets
                            what is shown and written meanwhile
    sessions.evaluation, sessions.model_evaluation, sessions.rescore, sessions.replay_into
                            sessions for other ends than training

To add a kind of session: a module here that prepares a folder and a config, and calls `session`.
"""
