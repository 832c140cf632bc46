"""Conversion rules for the losses of verl's PPO trainer: estimator and loss mode, what losses are averaged over, the
clip, the divergence, and the correction for who sampled.

They follow verl/trainer/ppo/core_algos.py.
"""

from __future__ import annotations

from typing import Any

from rftstream.integrations.foreign_configs.conversion import Conversion

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
LEVELS = ("token", "sequence", "geometric")
MODES = ("gspo", "cispo", "sapo")
"""Values of loss_mode that are algorithms here."""
AVERAGED = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "constant",
    "seq-mean-token-sum-norm": "constant",
}
DIVERGENCES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def put_loss(c: Conversion, estimators: dict[str, str]) -> None:
    """Write the algorithm and its loss. `estimators`: adv_estimator -> algorithm."""
    estimator, there = c.get("algorithm.adv_estimator"), "algorithm.adv_estimator"
    mode = c.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    c.algorithm = estimators.get(estimator, "grpo")
    if estimator not in estimators:
        c.leave(there, f"{estimator!r} has no counterpart; grpo stands in its place")
    if mode in MODES and c.algorithm == "grpo":
        c.algorithm, there = mode, f"{there} {estimator}, {ACTOR}.policy_loss.loss_mode"
    elif mode != "vanilla":
        c.leave(f"{ACTOR}.policy_loss.loss_mode", f"{mode!r} has no counterpart; PPO's clip stands in its place")
    _average(c, there)
    if estimator == "reinforce_plus_plus_baseline":
        c.put("algorithms.reinforce_plus_plus.group_baseline", True, "algorithm.adv_estimator")
    place = f"algorithms.{c.algorithm}"
    _scale(c, place)
    _clip(c, place)
    _divergence(c, place)
    _correction(c, place)
    _overlong(c, place)


def _average(c: Conversion, there: str) -> None:
    """Write the algorithm, which `there` chose, and what its losses are averaged over."""
    name = f"{ACTOR}.loss_agg_mode"
    reduction, constant = c.get(name), c.get(f"{ACTOR}.loss_scale_factor", c.get("data.max_response_length"))
    averaged = AVERAGED.get(reduction, "token")
    if reduction not in AVERAGED:
        c.leave(name, f"{reduction!r} has no counterpart; the mean over tokens stands in its place")
    if c.algorithm == "grpo" and averaged == "constant":
        c.algorithm, there = "dr_grpo", f"{name} {reduction}, algorithm.norm_adv_by_std_in_grpo"
        is_sum = reduction == "seq-mean-token-sum"
        said = name if is_sum else f"{name}: loss_scale_factor, data.max_response_length"
        c.put("algorithms.dr_grpo.row_tokens", 1 if is_sum else constant, said)
    elif c.algorithm == "grpo":
        c.put("algorithms.grpo.normalise", averaged, name if reduction in AVERAGED else f"in the place of {reduction}")
    elif c.algorithm == "rloo":
        c.ask("verl's rloo clips the ratio of each token and averages over tokens; here both are of rows")
    elif c.algorithm not in ("gspo", "sapo") and averaged != "token":
        c.leave(f"{name} = {reduction!r}", f"{c.algorithm} averages over tokens")
    c.put("trainer.algorithm", c.algorithm, there)


def _scale(c: Conversion, place: str) -> None:
    name = "algorithm.norm_adv_by_std_in_grpo"
    scale = "group" if c.get(name, True) else "none"
    if not c.has_setting(f"{place}.scale_rewards"):
        if c.get(name, only_given=True) is not None:
            c.leave(name, f"it is for grpo, in verl, too, and not for {c.algorithm}")
    elif scale != ("none" if c.algorithm == "dr_grpo" else "group"):
        c.put(f"{place}.scale_rewards", scale, name)


def _clip(c: Conversion, place: str) -> None:
    low, high = c.get(f"{ACTOR}.clip_ratio_low"), c.get(f"{ACTOR}.clip_ratio_high")
    if (given := c.get(f"{ACTOR}.clip_ratio", only_given=True)) not in (None, low, high):
        c.leave(f"{ACTOR}.clip_ratio = {given}", "verl takes clip_ratio_low and clip_ratio_high, which are 0.2 unset")
    if c.algorithm == "cispo":
        c.put(f"{place}.max_ratio", 1 + high, f"{ACTOR}.clip_ratio_high {high} + 1")
        c.ask("verl's cispo bounds ratios below, too, by 1 - clip_ratio_low; cispo here does not")
        return
    if c.algorithm == "sapo":
        c.put(f"{place}.tau_positive", c.get(f"{ACTOR}.tau_pos", 1.0), f"{ACTOR}.tau_pos")
        c.put(f"{place}.tau_negative", c.get(f"{ACTOR}.tau_neg", 1.05), f"{ACTOR}.tau_neg")
        return
    c.put(f"{place}.clip_low", low, f"{ACTOR}.clip_ratio_low")
    c.put(f"{place}.clip_high", high, f"{ACTOR}.clip_ratio_high")
    if c.algorithm == "gspo":
        c.leave(f"{ACTOR}.clip_ratio_c", "gspo has no dual clip in verl")
    else:
        c.take([f"{ACTOR}.clip_ratio_c"])


def _divergence(c: Conversion, place: str) -> None:
    in_reward, in_loss = c.get("algorithm.use_kl_in_reward"), c.get(f"{ACTOR}.use_kl_loss")
    if in_loss:
        name = f"{ACTOR}.kl_loss_type"
        kind = str(c.get(name, "low_var_kl"))
        estimator, said = (
            "k2" if kind.endswith("+") else DIVERGENCES.get(kind),
            f"{name} {kind}",
        )  # +: the gradient of k2
        if estimator in (None, "k1"):
            c.leave(f"{name} = {kind!r}", "it has no gradient on average, or no counterpart; k3 stands in its place")
            estimator, said = "k3", f"in the place of {kind}"
        c.put(f"{place}.kl_coef", c.get(f"{ACTOR}.kl_loss_coef", 0.001), f"{ACTOR}.kl_loss_coef, use_kl_loss")
        c.put(f"{place}.kl_estimator", estimator, said)
        if in_reward:
            c.leave("algorithm.use_kl_in_reward", "the divergence is in the loss, and in one place alone")
    elif in_reward:
        name = "algorithm.kl_penalty"
        kind = str(c.get(name, "kl")).rstrip("+")
        if kind not in DIVERGENCES:
            c.leave(f"{name} = {kind!r}", "it has no counterpart; k1 stands in its place")
        c.put(f"{place}.kl_in", "reward", "algorithm.use_kl_in_reward")
        c.put(f"{place}.kl_coef", c.get("algorithm.kl_ctrl.kl_coef", 0.001), "algorithm.kl_ctrl.kl_coef")
        said = f"{name} {kind}" if kind in DIVERGENCES else f"in the place of {kind}"
        c.put(f"{place}.kl_estimator", DIVERGENCES.get(kind, "k1"), said)
        if c.has_setting(f"{place}.scale_rewards"):
            c.ask(
                "use_kl_in_reward: verl divides by the spread of rewards minus divergence, here it is taken off after"
            )
    for name in (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type", "algorithm.kl_ctrl.kl_coef"):
        c.get(name)


def _correction(c: Conversion, place: str) -> None:
    sampled, rejected = c.get(f"{CORRECTION}.rollout_is"), c.get(f"{CORRECTION}.rollout_rs")
    older = c.get(f"{ACTOR}.tis_imp_ratio_cap", -1)
    if c.get(f"{CORRECTION}.bypass_mode"):
        c.put(f"{place}.ratio_from", "behavior", f"{CORRECTION}.bypass_mode")
        c.put(f"{place}.correction", "none", f"{CORRECTION}.bypass_mode: the ratio corrects")
        for name, given in (("rollout_is", sampled), ("rollout_rs", rejected)):
            if given:
                c.leave(f"{CORRECTION}.{name} = {given!r}", "with bypass_mode the ratio corrects")
    elif sampled in LEVELS:
        _weights(c, place, str(sampled), c.get(f"{CORRECTION}.rollout_is_threshold", 2.0))
        if rejected:
            bound = f", rollout_rs_threshold = {c.get(f'{CORRECTION}.rollout_rs_threshold')}"
            c.leave(f"{CORRECTION}.rollout_rs = {rejected!r}{bound}", "there is one correction, that of rollout_is")
    elif rejected in LEVELS:
        c.put(f"{place}.correction", "mis", f"{CORRECTION}.rollout_rs")
        c.put(f"{place}.correction_level", rejected, f"{CORRECTION}.rollout_rs {rejected}")
        if (most := c.get(f"{CORRECTION}.rollout_rs_threshold")) is not None:
            c.put(f"{place}.correction_high", float(most), f"{CORRECTION}.rollout_rs_threshold")
    elif older > 0:
        _weights(c, place, "token", older, f"{ACTOR}.tis_imp_ratio_cap")
    else:
        for name, given in (("rollout_is", sampled), ("rollout_rs", rejected)):
            if given:
                c.leave(f"{CORRECTION}.{name} = {given!r}", f"there are {', '.join(LEVELS)}, and correction_low, _high")
        if c.has_setting(f"{place}.correction"):
            c.put(f"{place}.correction", "tis", "verl: rollout_is is null, nothing is corrected; none is as there")


def _weights(
    c: Conversion, place: str, level: str, bound: Any, there: str = f"{CORRECTION}.rollout_is_threshold"
) -> None:
    """Write weights with an upper bound, or with both, `0.5_5.0`: outside of these verl drops tokens, as icepop."""
    low, is_both, high = str(bound).rpartition("_")
    c.put(f"{place}.correction", "icepop" if is_both else "tis", there)
    c.put(f"{place}.correction_level", level, f"{CORRECTION}.rollout_is {level}")
    if is_both:
        c.put(f"{place}.correction_low", float(low), there)
    c.put(f"{place}.correction_high", float(high), there)


def _overlong(c: Conversion, place: str) -> None:
    """Take DAPO's penalty of length. It has moved twice."""
    for prefix in ("reward.reward_kwargs", "reward_model.reward_kwargs", "reward_model"):
        buffer = f"{prefix}.overlong_buffer{'_cfg' if prefix.endswith('kwargs') else ''}"
        if c.get(f"{buffer}.enable"):
            tokens, longest = c.get(f"{buffer}.len"), c.get("data.max_response_length")
            c.put(
                f"{place}.overlong_share",
                tokens / longest,
                f"{buffer}: enable, len {tokens} / data.max_response_length {longest}",
            )
            factor = float(c.get(f"{buffer}.penalty_factor", 1.0))
            c.put(f"{place}.overlong_penalty", factor, f"{buffer}.penalty_factor")
        c.get(f"{buffer}.log"), c.get(f"{prefix}.max_resp_len"), c.get(f"{buffer}.len")
        c.get(f"{buffer}.penalty_factor")
