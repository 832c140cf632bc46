"""Conversion rules for the losses of TRL's GRPO and RLOO: what is averaged, what rewards are divided by, whose ratio is
clipped, the divergence, and the correction for who sampled.

`tests/parity` compares these losses with TRL's own code.
"""

from __future__ import annotations

from rftstream.integrations.foreign_configs.conversion import Conversion

CORRECTIONS = {"truncate": "tis", "mask": "mask"}
SCALES = {"True": "group", "False": "none"}


def put_loss(c: Conversion, kind: str, losses: dict[str, list[str]]) -> None:
    """Write the algorithm and its loss. `losses`: loss_type -> algorithm, and what its losses are averaged over."""
    if kind == "rloo":
        c.put("algorithms.rloo.kl_coef", c.get("beta"), "beta")
        if c.get("beta"):
            c.put("algorithms.rloo.kl_in", "reward", "beta: RLOO takes the divergence from the reward")
            c.put("algorithms.rloo.kl_estimator", "k1", "beta: RLOO sums log-ratios")
        c.take(["epsilon", "epsilon_high"])
        return
    loss, is_by_row = c.get("loss_type"), c.get("importance_sampling_level") == "sequence"
    if (level := c.get("importance_sampling_level", "token")) not in ("token", "sequence"):
        c.leave(
            f"importance_sampling_level = {level!r}", "there are 'token' and 'sequence'; 'token' stands in its place"
        )
    if loss not in losses:
        c.leave("loss_type", f"{loss!r} has no counterpart; the mean over tokens stands in its place")
    c.algorithm, normalise = losses.get(loss, ["grpo", "token"])
    if is_by_row and c.algorithm in ("cispo", "sapo"):
        c.leave("importance_sampling_level", f"{c.algorithm} has a ratio for each token, and none for a row")
    elif is_by_row:
        c.algorithm = "gspo"
        c.put("algorithms.gspo.clip_low", c.get("epsilon"), "epsilon")
        c.put("algorithms.gspo.clip_high", c.get("epsilon_high", c.get("epsilon")), "epsilon_high, epsilon")
    if c.algorithm != "grpo":
        said = f"importance_sampling_level, loss_type {loss!r}" if c.algorithm == "gspo" else f"loss_type {loss!r}"
        c.put("trainer.algorithm", c.algorithm, said)
    place = f"algorithms.{c.algorithm}"
    if c.algorithm in ("grpo", "gspo"):
        c.put(f"{place}.normalise", normalise, f"loss_type {loss!r}" if loss in losses else "in the place of that loss")
    if normalise == "constant" and loss == "luspo":
        c.put(f"{place}.row_tokens", 1, "loss_type 'luspo': sums over rows")
    elif normalise == "constant":
        c.put(f"{place}.row_tokens", c.get("max_completion_length"), "max_completion_length")
    _advantages(c, place)
    _clip(c, place)
    _divergence(c, place, is_by_row)
    if c.get("entropy_coef") and normalise != "token":
        c.ask(f"entropy_coef: TRL averages entropy over tokens, here it is averaged as the loss is: {normalise}")


def _advantages(c: Conversion, place: str) -> None:
    given = str(c.get("scale_rewards"))
    scale = SCALES.get(given, given)
    if scale != ("none" if c.algorithm == "dr_grpo" else "group"):
        c.put(f"{place}.scale_rewards", scale, "scale_rewards")
    if scale != "none":
        c.put(f"{place}.advantage_eps", 1e-4, "scale_rewards: TRL adds 1e-4 to the spread")


def _clip(c: Conversion, place: str) -> None:
    if c.algorithm == "cispo":
        c.put(f"{place}.max_ratio", c.get("epsilon_high", c.get("epsilon")), "epsilon_high, epsilon")
    elif c.algorithm == "sapo":
        c.put(f"{place}.tau_positive", c.get("sapo_temperature_pos", 1.0), "sapo_temperature_pos")
        c.put(f"{place}.tau_negative", c.get("sapo_temperature_neg", 1.05), "sapo_temperature_neg")
        for name in ("epsilon", "epsilon_high"):
            if c.get(name, only_given=True) is not None:
                c.leave(name, "sapo has a gate in the place of a clip, in TRL, too")
    else:
        c.take(["epsilon", "epsilon_high"] if c.get("epsilon", only_given=True) is not None else ["epsilon_high"])


def _divergence(c: Conversion, place: str, is_by_row: bool) -> None:
    is_unbiased = bool(c.get("use_bias_correction_kl"))
    if c.get("beta"):
        c.put(f"{place}.kl_coef", c.get("beta"), "beta: k3, in the loss")
        c.put(f"{place}.kl_unbiased", is_unbiased, "use_bias_correction_kl")
        if is_unbiased and is_by_row:
            c.ask("use_bias_correction_kl: TRL multiplies by the ratio of the row, here it is that of each token")


def put_correction(c: Conversion, kind: str) -> None:
    """Write the correction for the difference between the engine that sampled and the trainer."""
    place, given = f"algorithms.{c.algorithm}.correction", c.get("vllm_importance_sampling_correction")
    if kind == "rloo" or not c.get("use_vllm"):
        who = "RLOO corrects nothing" if kind == "rloo" else "without use_vllm nothing is corrected"
        c.put(place, "tis", f"TRL: {who}; here others sample, with weights near 1; none is as there")
        return
    if given is False:
        c.put(place, "none", "vllm_importance_sampling_correction")
        return
    mode = c.get("vllm_importance_sampling_mode", "sequence_mask")
    level, _, treatment = mode.partition("_")
    c.put(place, CORRECTIONS[treatment], f"vllm_importance_sampling_mode {mode!r}")
    c.put(f"{place}_level", level, f"vllm_importance_sampling_mode {mode!r}")
    older, name = "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"
    c.put(f"{place}_high", c.get(older, c.get(name, 3.0)), older if c.get(older) else name)
    if (low := c.get("vllm_importance_sampling_clip_min")) is not None:
        c.put(f"{place}_low", low, "vllm_importance_sampling_clip_min")
