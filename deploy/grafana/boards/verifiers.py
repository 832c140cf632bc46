"""Are rollouts scored, how fast, and why not?"""

from boards.panel import RATE, RUN, Dashboard, Panel, Query, Unit, newest, quantiles, rate, total

OF_VERIFIERS = 'role="verifier"'

DASHBOARD = Dashboard(
    name="verifiers",
    about="Are rollouts scored, how fast, at what cost, and why not?",
    rows={
        "Verdicts": (
            Panel(
                title="Verdicts a second",
                about="Scored, or the reason why not.",
                queries=(rate("rftstream_verdicts_total", "result"),),
                unit=Unit.per_s,
                is_stacked=True,
            ),
            Panel(
                title="Without a reward",
                about="Share of the rollouts that were not skipped. At verifier.max_dead_share the run ends with exit "
                "6; `rftstream dead list RUN` shows the errors.",
                queries=(
                    Query(
                        expr=f'sum by (run) (rate(rftstream_verdicts_total{{result!~"scored|skipped", {RUN}}}{RATE}))'
                        f' / sum by (run) (rate(rftstream_verdicts_total{{result!="skipped", {RUN}}}{RATE}))',
                        legend="{{run}}",
                    ),
                ),
                unit=Unit.share,
            ),
            Panel(
                title="Time of a verdict",
                about="All tries included. A p95 near verifier.timeout_s: rewards hang; mend them, or raise the limit.",
                queries=quantiles("rftstream_verdict_seconds"),
                unit=Unit.seconds,
            ),
            Panel(
                title="Dead letters a minute",
                about="Records that verifiers gave up, by reason. `rftstream dead retry RUN` puts them back when the "
                "cause is mended.",
                queries=(rate("rftstream_dead_letters_total", "reason", where=OF_VERIFIERS, times=60),),
                unit=Unit.per_min,
            ),
            Panel(
                title="What judges cost",
                about="Requests, tokens and money of rewards that ask models, an hour; nothing where none does.",
                queries=(rate("rftstream_reward_spent_total", "kind", times=3600),),
            ),
        ),
        "Amount": (
            Panel(
                title="Backlog",
                about="Rollouts that wait for a verdict. Growing: more verifiers, or a faster reward.",
                queries=(newest("rftstream_backlog_rollouts", where=OF_VERIFIERS, legend="rollouts"),),
            ),
            Panel(
                title="Verifiers wanted",
                about="ceil(backlog / max_concurrent), what an autoscaler asks for; verifiers that answer; and "
                "partitions, more than which do nothing.",
                queries=(
                    newest("rftstream_workers_wanted", where=OF_VERIFIERS, legend="wanted"),
                    Query(expr=f'sum by (run) (up{{job="verifier", {RUN}}})', legend="there"),
                    newest("rftstream_run_partitions", legend="partitions"),
                ),
            ),
            Panel(
                title="In hand",
                about="Rollouts that are being scored. At verifier.max_concurrent for each: they have all they can "
                "take.",
                queries=(total("rftstream_in_hand", where=OF_VERIFIERS, legend="rollouts"),),
            ),
        ),
    },
)
