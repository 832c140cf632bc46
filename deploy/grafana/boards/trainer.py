"""What does the trainer spend its time on, and what holds it up?"""

from boards.panel import Dashboard, Panel, Unit, newest, quantiles, rate, train

DASHBOARD = Dashboard(
    name="trainer",
    about="What do trainer and buffer spend their time on, and what holds them up?",
    rows={
        "Steps": (
            Panel(
                title="Steps a minute",
                about="Skipped ones gave a NaN or an infinite value; the trainer's log names the batch.",
                queries=(rate("rftstream_steps_total", "result", times=60),),
                unit=Unit.per_min,
            ),
            Panel(
                title="Time of a step",
                about="Mostly waiting: more explorers or verifiers. Mostly training: a faster device, or smaller "
                "batches.",
                queries=(train("step_s", "training"), train("wait_s", "waiting"), train("publish_s", "publishing")),
                unit=Unit.seconds,
                is_stacked=True,
            ),
            Panel(
                title="Batches that wait",
                about="Made and not yet trained. Always above 0: the trainer is what the run waits for.",
                queries=(newest("rftstream_backlog_batches", legend="batches"),),
            ),
            Panel(
                title="Tokens a second",
                about="Trained, by the time between two steps; computed, prompts and all passes included, by training.",
                queries=(train("tokens_per_s", "trained"), train("computed_tokens_per_s", "computed")),
                unit=Unit.per_s,
            ),
            Panel(
                title="Size of a batch",
                about="Groups and rollouts as they were batched, and rollouts that had something to train on.",
                queries=(
                    train("num_groups", "groups"),
                    train("num_rollouts", "rollouts"),
                    train("trained_rollouts", "trained"),
                ),
            ),
            Panel(
                title="Rollouts that wait for a batch",
                about="For the buffer: scored ones of groups that lack siblings. For the trainer: those in batches.",
                queries=(newest("rftstream_backlog_rollouts", "role", where='role=~"buffer|trainer"'),),
                is_stacked=True,
            ),
        ),
        "Versions": (
            Panel(
                title="Publishing a version",
                about="Taken from the backend and written to the store, the latter beside the next step.",
                queries=quantiles("rftstream_weights_publish_seconds"),
                unit=Unit.seconds,
            ),
            Panel(
                title="Training held up",
                about="The part of publishing for which training stands still.",
                queries=quantiles("rftstream_training_held_up_seconds"),
                unit=Unit.seconds,
            ),
            Panel(
                title="Trained and published",
                about="They part only between two steps. If they stay apart, the object store refuses. Published ends "
                "where no trainer answers.",
                queries=(
                    newest("rftstream_run_version", legend="trained"),
                    newest("rftstream_published_version", legend="published"),
                ),
            ),
            Panel(
                title="Take-overs",
                about="Epoch in force of each role that there is one of. It rises with each start of such a worker.",
                queries=(newest("rftstream_run_epoch", "role"),),
            ),
        ),
    },
)
