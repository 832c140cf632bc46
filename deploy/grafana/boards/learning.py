"""Does the model learn, and what does it learn from?"""

from boards.panel import Dashboard, Panel, Unit, newest, train

DASHBOARD = Dashboard(
    name="learning",
    about="Does the model learn? Metrics of steps, as docs/operations.md explains them, and evaluations.",
    rows={
        "Reward": (
            Panel(
                title="Reward",
                about="Of all scored rollouts of groups decided since the step before. Flat at 0 or 1: the problems "
                "are too hard or too easy, or the reward does not fit; `rftstream status RUN` names likely "
                "causes.",
                queries=(train("reward"),),
            ),
            Panel(
                title="Evaluations",
                about="Newest mean of each. Reward rises and these do not: the reward is gained without the task.",
                queries=(newest("rftstream_run_evaluation", "evaluation"),),
            ),
            Panel(
                title="Spread of rewards",
                about="Standard deviation. At 0 there is nothing to compare, and so nothing to learn from.",
                queries=(train("reward_std"),),
            ),
            Panel(
                title="Groups without a signal",
                about="Share of the batch's groups whose rewards are all equal. Near 1: choose other problems.",
                queries=(train("groups_without_signal_share", "of the batch"),),
                unit=Unit.share,
            ),
            Panel(
                title="Steps without a signal",
                about="In a row. After trainer.max_steps_without_signal the run ends with exit 6.",
                queries=(newest("rftstream_steps_without_signal"),),
            ),
            Panel(
                title="What became of groups",
                about="Shares of what was decided since the step before. Only batched ones are trained on.",
                queries=tuple(
                    train(f"{name}_share", name.replace("_", " "))
                    for name in ("batched", "filtered", "expired", "dead", "zero_variance")
                ),
                unit=Unit.share,
            ),
        ),
        "Answers": (
            Panel(
                title="Length of a rollout",
                about="Sampled tokens. Growing while the reward does not: look at rollouts; overlong_penalty helps.",
                queries=(train("length_mean", "tokens"),),
            ),
            Panel(
                title="Cut off, unscored, masked",
                about="Shares: rollouts that a token limit ended, rollouts without a reward, tokens not trained on. "
                "Many cut off: raise sampling.max_tokens.",
                queries=(
                    train("truncated_share", "cut off"),
                    train("unscored_share", "unscored"),
                    train("masked_fraction", "masked"),
                ),
                unit=Unit.share,
            ),
            Panel(
                title="Entropy",
                about="Falling to 0 early: the policy no longer tries anything; a larger clip above, or an entropy "
                "bonus.",
                queries=(train("entropy"),),
            ),
        ),
        "Update": (
            Panel(
                title="Loss",
                about="Says little by itself in policy gradients; NaN or jumps are what to look for.",
                queries=(train("loss"), train("policy_loss")),
            ),
            Panel(
                title="Gradient norm",
                about="Before clipping. Spikes: a lower learning rate, or look at that batch's rollouts.",
                queries=(train("grad_norm"),),
            ),
            Panel(title="Learning rate", about="As it was scheduled.", queries=(train("lr"),)),
            Panel(
                title="Clipped tokens",
                about="Share of tokens without a gradient for the clip. Above a tenth: the update is too far off.",
                queries=(train("clip_fraction"),),
                unit=Unit.share,
            ),
            Panel(
                title="Sampler against trainer",
                about="Divergence of the sampler's logprobs from the trainer's. Above trainer.warn_mismatch the "
                "trainer's log names the likely cause.",
                queries=(train("mismatch_k3"),),
            ),
            Panel(
                title="Advantages",
                about="Standard deviation and largest value over rollouts; no spread is no signal.",
                queries=(train("advantage_std", "spread"), train("advantage_max", "largest")),
            ),
        ),
    },
)
