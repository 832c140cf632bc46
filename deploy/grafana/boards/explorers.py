"""Do explorers sample enough, with weights that are new enough?"""

from boards.panel import RUN, Dashboard, Panel, Query, Unit, age, newest, quantiles, rate, total, train

OF_EXPLORERS = 'role="explorer"'

DASHBOARD = Dashboard(
    name="explorers",
    about="Do explorers sample enough, with weights that are new enough? How many of them does the backlog ask for?",
    rows={
        "Amount": (
            Panel(
                title="Sampled rollouts a second",
                about="By how they ended. Failed ones: the explorers' logs and `rftstream dead list RUN` say why.",
                queries=(rate("rftstream_rollouts_total", "status"),),
                unit=Unit.per_s,
                is_stacked=True,
            ),
            Panel(
                title="Sampled tokens a second",
                about="Sampled tokens of finished rollouts. Falling with as much in flight: longer answers share a "
                "batch.",
                queries=(rate("rftstream_sampled_tokens_total", "role"),),
                unit=Unit.per_s,
            ),
            Panel(
                title="In flight",
                about="Rollouts taken and not yet committed, and the most that may be sampled at once "
                "(explorer.max_concurrent). Below: there are no tasks.",
                queries=(
                    total("rftstream_in_hand", where=OF_EXPLORERS, legend="rollouts"),
                    total("rftstream_max_concurrent", legend="most"),
                ),
            ),
            Panel(
                title="Explorers wanted",
                about="ceil(backlog / max_concurrent), what an autoscaler asks for; explorers that answer; and "
                "partitions, more than which do nothing.",
                queries=(
                    newest("rftstream_workers_wanted", where=OF_EXPLORERS, legend="wanted"),
                    Query(expr=f'sum by (run) (up{{job="explorer", {RUN}}})', legend="there"),
                    newest("rftstream_run_partitions", legend="partitions"),
                ),
            ),
            Panel(
                title="Backlog",
                about="Rollouts that wait to be sampled, or are being sampled.",
                queries=(newest("rftstream_backlog_rollouts", where=OF_EXPLORERS, legend="rollouts"),),
            ),
            Panel(
                title="Changes of partitions",
                about="In the last hour. Many without a change of their number: explorers lose their sessions.",
                queries=(
                    Query(
                        expr=f"sum by (run) (increase(rftstream_rebalances_total{{{OF_EXPLORERS}, {RUN}}}[1h]))",
                        legend="changes",
                    ),
                ),
            ),
        ),
        "Time": (
            Panel(
                title="A rollout",
                about="From the beginning of sampling to the last token. A p95 far above the median: few long ones "
                "hold their groups up; explorer.rollout_timeout_s bounds them.",
                queries=quantiles("rftstream_rollout_seconds"),
                unit=Unit.seconds,
            ),
            Panel(
                title="A call of an environment",
                about="By method. Slow replies hold a rollout up, not its explorer.",
                queries=quantiles("rftstream_environment_seconds", "method"),
                unit=Unit.seconds,
            ),
            Panel(
                title="Calls given up",
                about="Calls of environments that took longer than explorer.reply_timeout_s, a minute.",
                queries=(rate("rftstream_abandoned_calls_total", "method", times=60),),
                unit=Unit.per_min,
            ),
        ),
        "Weights": (
            Panel(
                title="Versions",
                about="Published, and sampled with. A gap that grows: weights are refused or cannot be fetched. "
                "Published ends where no trainer answers.",
                queries=(
                    newest("rftstream_published_version", legend="published"),
                    newest("rftstream_policy_version", where=OF_EXPLORERS, legend="newest explorer"),
                    Query(
                        expr=f"min by (run) (rftstream_policy_version{{{OF_EXPLORERS}, {RUN}}})",
                        legend="oldest explorer",
                    ),
                ),
            ),
            Panel(
                title="Age of the weights",
                about="Since the weights that are sampled with were announced. Above the time of a step: see Versions.",
                queries=(age("rftstream_weights_timestamp_seconds", "role"),),
                unit=Unit.seconds,
            ),
            Panel(
                title="Fetching and taking over",
                about="Beside sampling, so only its end holds anything up. Long: the object store, or the network to "
                "it.",
                queries=quantiles("rftstream_weights_fetch_seconds", "role"),
                unit=Unit.seconds,
            ),
            Panel(
                title="Sampling held up",
                about="For how long rollouts that were being sampled stood still for a version.",
                queries=quantiles("rftstream_sampling_held_up_seconds", "role"),
                unit=Unit.seconds,
            ),
            Panel(
                title="Staleness",
                about="In versions: between a rollout's oldest and newest token, and then until its batch.",
                queries=(
                    train("staleness_in_flight", "while it was sampled"),
                    train("staleness_in_queue", "while it waited"),
                ),
            ),
        ),
        "Model servers": (
            Panel(
                title="Servers that are asked",
                about="1: asked to sample by every explorer; 0: it has failed, and one of them leaves it alone for a "
                "while. Of runs with the policy openai.",
                queries=(Query(expr=f"min by (run, server) (rftstream_server_up{{{RUN}}})", legend="{{server}}"),),
            ),
            Panel(
                title="Requests to a server a second",
                about="By how they ended. Refused: its rollout fails, the server stays. Failed: another one is asked.",
                queries=(rate("rftstream_server_requests_total", "server", "result"),),
                unit=Unit.per_s,
            ),
            Panel(
                title="Requests on the way to a server",
                about="One with far more than the others is slower, or holds the longest prompts.",
                queries=(total("rftstream_server_in_flight", "server"),),
            ),
        ),
        "Work kept and lost": (
            Panel(
                title="Tokens of prompts a second",
                about="Of `hf`: computed, or reused from siblings, turns before and forks. Few reused in long "
                "conversations: a larger turn_tokens of the policy.",
                queries=(rate("rftstream_prompt_tokens_total", "result"),),
                unit=Unit.per_s,
            ),
            Panel(
                title="Tokens of unfinished rollouts a second",
                about="Saved to the log, resumed from there, lost. Many lost ones: a smaller explorer.partial_every_s.",
                queries=(rate("rftstream_partial_tokens_total", "result"),),
                unit=Unit.per_s,
            ),
            Panel(
                title="New segments a minute",
                about="Turns whose prompt does not go on from the tokens before, by reason. Each costs a prefill, and "
                "tokens are trained on in pieces: a template that keeps its history avoids it.",
                queries=(rate("rftstream_segment_breaks_total", "reason", times=60),),
                unit=Unit.per_min,
            ),
        ),
    },
)
