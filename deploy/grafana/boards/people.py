"""Are people's answers coming, and do they arrive in time?"""

from boards.panel import RUN, Dashboard, Panel, Query, Unit, age, newest

DASHBOARD = Dashboard(
    name="people",
    about="Are people's answers coming, and do they arrive in time to count? Empty without [feedback].",
    rows={
        "Questions": (
            Panel(
                title="Questions",
                about="By how they stand. Many expired ones: more annotators, a longer feedback.expires_s, or fewer "
                "questions.",
                queries=(newest("rftstream_run_questions", "state"),),
                is_stacked=True,
            ),
            Panel(
                title="Oldest open question",
                about="How long it has waited. Groups with feedback.hold_s wait with it.",
                queries=(age("rftstream_run_oldest_question_timestamp_seconds"),),
                unit=Unit.seconds,
            ),
            Panel(
                title="Questions an hour",
                about="How many were asked within the last hour; annotators have to answer as many.",
                queries=(
                    Query(
                        expr=f"sum by (run) (rftstream_run_questions{{{RUN}}})"
                        f" - (sum by (run) (rftstream_run_questions{{{RUN}}} offset 1h)"
                        f" or 0 * sum by (run) (rftstream_run_questions{{{RUN}}}))",
                        legend="asked",
                    ),
                ),
            ),
        ),
        "Votes": (
            Panel(
                title="Votes",
                about="By what became of them. Late ones came after their question was over; pending ones wait for the "
                "buffer: is it alive?",
                queries=(
                    newest("rftstream_run_votes_total", "effect"),
                    newest("rftstream_run_votes_pending", legend="pending"),
                ),
            ),
            Panel(
                title="Votes an hour",
                about="Without those that changed nothing, since they were late or of nothing known.",
                queries=(
                    Query(
                        expr=f'sum by (run) (increase(rftstream_run_votes_total{{effect="counted", {RUN}}}[1h]))',
                        legend="counted",
                    ),
                ),
            ),
        ),
    },
)
