"""Is all well? If not, which of the other dashboards to open."""

from boards.panel import RUN, Dashboard, Panel, Query, Unit, age, newest, rate, total, train

PROCESSES = f'job=~"feeder|explorer|verifier|buffer|trainer|evaluator|synthesiser", {RUN}'

DASHBOARD = Dashboard(
    name="overview",
    about="Is all well? If not: what stands out here leads to one of the other dashboards.",
    rows={
        "Now": (
            Panel(
                title="State",
                about="The state that the run is in. Stopped though nobody stopped it: see the logs of the workers.",
                queries=(
                    Query(expr=f"max by (run, state) (rftstream_run_state{{{RUN}}}) == 1", legend="{{run}} {{state}}"),
                ),
                is_number=True,
            ),
            Panel(
                title="Version",
                about="Steps that were trained, and the version at which the run ends, where that is known.",
                queries=(
                    newest("rftstream_run_version", legend="{{run}}"),
                    newest("rftstream_run_steps_planned", legend="{{run}} planned"),
                ),
                is_number=True,
            ),
            Panel(
                title="Reward",
                about="Mean reward of the last step. Falling: dashboard learning.",
                queries=(newest("rftstream_run_reward", legend="{{run}}"),),
                is_number=True,
            ),
            Panel(
                title="Since the last step",
                about="Far above the usual time of a step: see which role has the backlog, then that role's dashboard.",
                queries=(age("rftstream_run_last_step_timestamp_seconds", legend="{{run}}"),),
                unit=Unit.seconds,
                is_number=True,
            ),
            Panel(
                title="Oldest open group",
                about="How long the oldest group without an outcome has been under way. Growing without end: "
                "`rftstream trace RUN GROUP` shows what it waits for.",
                queries=(age("rftstream_run_oldest_open_timestamp_seconds", legend="{{run}}"),),
                unit=Unit.seconds,
                is_number=True,
            ),
            Panel(
                title="Room on the disk",
                about="Where the run folder is. A run whose disk is full stands still and then ends, to be resumed.",
                queries=(Query(expr=f"min by (run) (rftstream_disk_free_bytes{{{RUN}}})", legend="{{run}}"),),
                unit=Unit.bytes,
                is_number=True,
            ),
        ),
        "Flow": (
            Panel(
                title="Backlog by role",
                about="Rollouts whose next step is this role's, as `rftstream audit` counts them. The role with the "
                "largest one is what the run waits for: more workers of it, if it is explorer or verifier.",
                queries=(newest("rftstream_backlog_rollouts", "role"),),
                is_stacked=True,
            ),
            Panel(
                title="Groups a second by outcome",
                about="Batched ones are trained on. Many expired ones: too few explorers, or max_staleness too small.",
                queries=(rate("rftstream_groups_total", "result"),),
                unit=Unit.per_s,
                is_stacked=True,
            ),
            Panel(
                title="Steps a minute",
                about="Skipped ones gave a NaN or an infinite value: dashboard trainer.",
                queries=(rate("rftstream_steps_total", "result", times=60),),
                unit=Unit.per_min,
            ),
            Panel(
                title="Why groups have their outcome",
                about="From the log, since the run began. Unscored groups and their reasons: dashboard verifiers.",
                queries=(newest("rftstream_run_groups_total", "result", "reason"),),
            ),
            Panel(
                title="Staleness of a batch",
                about="In versions. Always at the bound: the trainer outruns sampling; more explorers help.",
                queries=(
                    train("staleness_mean", "mean"),
                    train("staleness_max", "largest"),
                    newest("rftstream_max_staleness", legend="bound"),
                ),
            ),
            Panel(
                title="Dead letters",
                about="Records given up, since the run began; `rftstream dead list RUN` shows the errors.",
                queries=(
                    Query(
                        expr=f"sum by (run) (rftstream_run_dead_letters_total{{{RUN}}}) or "
                        f"0 * max by (run) (rftstream_run_up{{{RUN}}})",
                        legend="{{run}}",
                    ),
                ),
            ),
        ),
        "Processes": (
            Panel(
                title="Workers that answer",
                about="By role. Fewer than were started: their logs say why.",
                queries=(Query(expr=f"sum by (job) (up{{{PROCESSES}}})", legend="{{job}}"),),
            ),
            Panel(
                title="Processors by role",
                about="Processors that are busy; processes in which rewards and environments run are not counted.",
                queries=(rate("process_cpu_seconds_total", "job"),),
            ),
            Panel(
                title="Memory by role",
                about="Of the workers themselves. Growing without end: restart the worker, nothing is lost.",
                queries=(total("process_resident_memory_bytes", "job"),),
                unit=Unit.bytes,
            ),
            Panel(
                title="Starts in the last hour",
                about="A role that is started again and again: its log says why it ended.",
                queries=(
                    Query(
                        expr=f"sum by (run, job) (changes(process_start_time_seconds{{{RUN}}}[1h]))", legend="{{job}}"
                    ),
                ),
            ),
            Panel(
                title="Versions of rftstream",
                about="Workers by the version that they run. Two of them side by side are meant only for an update.",
                queries=(Query(expr=f"count by (version) (rftstream_build_info{{{RUN}}})", legend="{{version}}"),),
            ),
            Panel(
                title="Exporters' view",
                about="How much of the log the exporter has read. Below 1, counts from the log are too small.",
                queries=(newest("rftstream_run_read_ratio"),),
                unit=Unit.share,
            ),
        ),
    },
)
