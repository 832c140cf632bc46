"""How a run is started and kept going: plan -> session -> supervisor -> host -> role.

In the order of reading:

    start                   `run`, `resume` and `create`: a run is planned (preflight/plan), and begun or continued
    session, result         from the start of the run's processes to the end of the last one, under the run's lock
    supervisor, processes   the processes of all roles: started, watched, and started again when they die
    zygote                  a process with the imports done, from which they are forked
    host                    a process of one role: its port, signals and limits, and the loop round the service
    display.progress, health, logging, targets
                            what a session shows and writes
    sessions.evaluation, sessions.model_evaluation, sessions.rescore, sessions.replay_into
                            sessions with other purposes than training

To add a kind of session: a module here that prepares a folder and a config, and calls `session`.
"""
