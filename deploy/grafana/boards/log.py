"""Does the log keep up, and do all workers write to it?"""

from boards.panel import RUN, Dashboard, Panel, Query, Unit, age, newest, quantiles, rate, total

DASHBOARD = Dashboard(
    name="log",
    about="What goes over the log, how long its transactions take, and who has stopped writing.",
    rows={
        "Amount": (
            Panel(
                title="Records written a second",
                about="By topic. A topic that falls silent before the others: its writer's dashboard.",
                queries=(rate("rftstream_records_out_total", "topic"),),
                unit=Unit.per_s,
            ),
            Panel(
                title="Records read a second",
                about="By topic, over all who read it.",
                queries=(rate("rftstream_records_in_total", "topic"),),
                unit=Unit.per_s,
            ),
            Panel(
                title="Bytes written a second",
                about="By topic: what the disk or the brokers have to take. [retention] bounds what is kept.",
                queries=(rate("rftstream_out_bytes_total", "topic"),),
                unit=Unit.bytes_per_s,
            ),
        ),
        "Transactions": (
            Panel(
                title="Transactions a second",
                about="By how they ended. Lost ones: another process took the role or the partitions over. Refused "
                "ones: the log does not take what is written; the worker's log says why.",
                queries=(rate("rftstream_transactions_total", "role", "result"),),
                unit=Unit.per_s,
            ),
            Panel(
                title="A commit",
                about="Long on Kafka: a broker that is slow or away. Long on the embedded log: a slow disk.",
                queries=quantiles("rftstream_commit_seconds", "role"),
                unit=Unit.seconds,
            ),
            Panel(
                title="A slice of work",
                about="What a role does between two looks at the log. Above 10 s on Kafka it may lose its partitions.",
                queries=quantiles("rftstream_step_seconds", "role"),
                unit=Unit.seconds,
            ),
        ),
        "Readers and writers": (
            Panel(
                title="Offsets that wait",
                about="By worker, marks of transactions included. Records that wait: dashboard overview.",
                queries=(total("rftstream_lag_offsets", "role", "topic"),),
            ),
            Panel(
                title="Partitions by worker",
                about="Explorers and verifiers share them. One that has none has nothing to do.",
                queries=(newest("rftstream_partitions", "job", "instance"),),
            ),
            Panel(
                title="Since a role last wrote",
                about="All of them growing: `rftstream status RUN` says what the run waits for.",
                queries=(age("rftstream_progress_timestamp_seconds", "role"),),
                unit=Unit.seconds,
            ),
            Panel(
                title="Dead letters a minute",
                about="Records that cannot be decoded, or are of another run: who writes to these topics?",
                queries=(
                    rate("rftstream_dead_letters_total", "role", where='reason=~"undecodable|foreign"', times=60),
                ),
                unit=Unit.per_min,
            ),
            Panel(
                title="The exporter reads it",
                about="1 if the exporter could read the run's log at its last look. 0: its own log says why.",
                queries=(newest("rftstream_run_up"),),
            ),
            Panel(
                title="Room on the disk",
                about="Where the run folder is; on the embedded log that is the log's own room.",
                queries=(Query(expr=f"min by (run) (rftstream_disk_free_bytes{{{RUN}}})", legend="{{run}}"),),
                unit=Unit.bytes,
            ),
        ),
    },
)
