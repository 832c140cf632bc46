"""Names of settings and commands in other tools: TRL, verl, prime-rl, Trinity-RFT, Hugging Face and others.

A name with a similar spelling may mean something else (`train` is nearer to `drain` than to `run`), so the meaning is
looked up here first. docs/coming-from.md explains the differences. A test checks that each TRL name in the table of
docs/coming-from-trl.md is here.
"""

from __future__ import annotations

from rftstream.contracts.role_names import RoleName

_SETTINGS = {
    # what is learned by
    "trainer.algorithm": (
        "algorithm_type adv_estimator importance_sampling_level loss_mode loss_type advantage.type algo.type loss.type"
    ),
    "algorithms.grpo.kl_coef": "beta kl_beta kl_loss_coef kl_coefficient use_kl_loss",
    "algorithms.grpo.kl_in": "use_kl_in_reward kl_ctrl.kl_coef",
    "algorithms.grpo.kl_estimator": "kl_loss_type",
    "algorithms.grpo.kl_unbiased": "use_bias_correction_kl",
    "algorithms.grpo.clip_low algorithms.grpo.clip_high": "epsilon clip_ratio cliprange",
    "algorithms.grpo.clip_high": "epsilon_high clip_ratio_high",
    "algorithms.grpo.clip_low": "clip_ratio_low",
    "algorithms.grpo.dual_clip": "clip_ratio_c delta",
    "algorithms.grpo.scale_rewards": "norm_adv_by_std_in_grpo",
    "algorithms.grpo.normalise": "loss_agg_mode",
    "algorithms.grpo.entropy_coefficient": "entropy_coeff entropy_coef",
    "algorithms.grpo.sequence_mask": "off_policy_mask_threshold",
    "algorithms.grpo.mask_truncated": "mask_truncated_completions",
    "algorithms.grpo.correction": (
        "vllm_importance_sampling_correction vllm_importance_sampling_mode rollout_is rollout_rs"
    ),
    "algorithms.grpo.correction_high": (
        "vllm_importance_sampling_cap vllm_importance_sampling_clip_max rollout_is_threshold"
    ),
    "algorithms.dppo.max_rise": "dppo_mask_high",
    "algorithms.dppo.max_fall": "dppo_mask_low",
    "algorithms.dppo.square_coef": "kl_tau",
    "algorithms.ppo.critic.lr": "critic.optim.lr",
    "algorithms.ppo.critic.value_clip": "cliprange_value",
    "algorithms.ppo.critic.max_grad_norm": "critic.grad_clip",
    "algorithms.ppo.critic.model": "critic.model.path",
    "algorithms.ppo.critic.warmup_batches": "critic_warmup",
    # the optimizer
    "trainer.lr": "learning_rate learningrate actor_lr",
    "trainer.lr_schedule": "lr_scheduler lr_scheduler_type scheduler warmup_style scheduler.type",
    "trainer.warmup_steps": "warmup lr_warmup_steps warmup_ratio",
    "trainer.min_lr_share": "min_lr_ratio",
    "trainer.adam_betas": "adam_beta1 adam_beta2 betas betas1 betas2",
    "trainer.adam_eps": "adam_epsilon",
    "trainer.router_aux_coef": "router_aux_loss_coef",
    "trainer.max_grad_norm": "grad_clip gradient_clipping max_norm clip_grad",
    "trainer.updates_per_batch": "num_iterations ppo_epochs",
    "trainer.minibatches": "steps_per_generation num_minibatches ppo_mini_batch_size",
    "trainer.tokens_per_microbatch": (
        "gradient_accumulation gradient_accumulation_steps micro_batch_size max_token_len_per_gpu "
        "ppo_max_token_len_per_gpu"
    ),
    "backends.torch.moments": "adamw_8bit adamw_bnb_8bit optim",
    "backends.torch.offload_activations": "activation_offloading enable_activation_offload ac_offloading",
    "backends.torch.gradient_checkpointing": "gradient_checkpointing enable_gradient_checkpointing model.ac",
    "trainer.backend": "actor.strategy trainer_type",
    "backends.deepspeed.processes": "num_processes nproc_per_node world_size",
    "trainer.reference_every": "sync_ref_model ref_model_sync_steps",
    "trainer.publish_every": "sync_interval",
    # batches and staleness
    "feeder.groups_per_batch": "batch_size train_batch_size generation_batch_size per_device_train_batch_size",
    "feeder.group_size": (
        "num_generations num_samples repeat_times rollouts_per_example rollout.n orchestrator.group_size"
    ),
    "feeder.max_staleness": "staleness max_async_level max_off_policy_steps",
    "buffer.zero_variance": "filter_groups online_difficulty_filtering curriculum.gates",
    # how long
    "run.steps": "max_steps num_steps total_steps total_training_steps train_steps",
    "tasksets.NAME.passes": "epochs num_epochs num_train_epochs total_epochs",
    # sampling
    "sampling.temperature": "sampling_temperature temp",
    "sampling.max_tokens": (
        "max_new_tokens max_length max_completion_length max_response_length max_response_tokens max_completion_tokens"
    ),
    "sampling.min_tokens": "min_response_tokens min_new_tokens",
    "sampling.top_p": "nucleus",
    "sampling.stop": "stop_token stop_tokens stop_strings stop_sequences stop_words",
    "sampling.grammar": (
        "response_format structured_outputs guided_json guided_regex guided_grammar guided_decoding json_schema "
        "vllm_structured_outputs_regex vllm_guided_decoding_regex"
    ),
    "trainer.masks": "keep_sampling_mask sampling_mask",
    "explorer.policy": "use_vllm engine engine_type rollout.name",
    "policies.vllm.engine": "vllm_gpu_memory_utilization vllm_tensor_parallel_size",
    "explorer.count": "engine_num num_workers",
    "explorer.max_concurrent": "max_num_seqs max_inflight_rollouts runner_per_model max_inflight",
    # model and data
    "model.path": "model_path model_name model_name_or_path model.name partial_pretrain",
    "model.context": "max_model_len max_model_length max_prompt_length max_seq_length seq_len vllm_max_model_length",
    "model.dtype": "bf16 fp16 torch_dtype",
    "model.chat_template": "custom_chat_template",
    "model.quantize": "load_in_4bit bnb_4bit_quant_type quantization_config qlora",
    "model.lora": "peft_config peft lora use_peft merge_and_unload",
    "model.lora.rank": "lora_rank lora_r",
    "model.lora.alpha": "lora_alpha",
    "model.lora.targets": "target_modules",
    "tasksets.NAME.source": "data dataset dataset_name train_dataset train_files custom_cls train.source",
    "evaluations.NAME.source": "eval eval_dataset val_files eval.env validation validation_set test_set",
    "tasksets.NAME.columns": "prompt_key response_key reward_fn_key",
    "tasksets.NAME.too_long": "data.truncation filter_overlong_prompts",
    "tasksets.NAME.system": "system_prompt",
    "tasksets.NAME.shuffle": "shuffle_dataset data.shuffle",
    "tasksets.NAME.reward": (
        "reward_fn reward_func reward_funcs reward_function reward_weights custom_reward_function.path "
        "custom_reward_function.name reward_model.enable"
    ),
    "rewards": "reward_kwargs",
    "tasksets.NAME.environment": "max_tool_calling_iterations multi_turn env",
    "tasksets.NAME.weight": "env_ratios source.ratio",
    "pipeline": "easy_threshold hard_threshold",
    "explorer.repetition_tokens": "filters",
    "evaluations.NAME.every": "eval_steps eval_interval test_freq eval.interval",
    "evaluations.NAME.pass_reward": "pass@1 pass@k accuracy held_out_accuracy eval_accuracy",
    "evaluations.NAME.n": "num_generations_eval eval.rollouts_per_example eval.group_size",
    "evaluations.NAME.sampling": "val_kwargs eval.sampling",
    "evaluations.NAME.num_tasks": "eval.num_examples",
    # what is kept and shown
    "run.folder": "output_dir checkpoint_root_dir default_local_dir",
    "run.name": "run_name experiment_name project_name",
    "run.resume": "resume_mode resume_from_checkpoint resume_step",
    "trainer.checkpoint_every": "save_steps save_freq save_interval ckpt.interval",
    "trainer.keep_checkpoints": "save_total_limit max_actor_ckpt_to_keep max_ckpt_to_keep keep_last",
    "trackers.tensorboard trackers.wandb trackers.mlflow trackers.trackio trackers.swanlab": "report_to logger",
    "trackers.wandb": "wandb wandb_project",
    "weights.store": "weight_broadcast.type sync_method",
    "transport.servers": "bootstrap_servers brokers kafka",
}
"""Setting here -> its names elsewhere; NAME stands for a taskset or an evaluation."""

SETTINGS = {name: tuple(here.split()) for here, names in _SETTINGS.items() for name in names.split()}
"""Name elsewhere -> the setting here. A dotted name is listed by the shortest end that is unambiguous
(`critic.optim.lr`)."""


def meant(name: str) -> tuple[str, ...]:
    """Return the setting here for a name elsewhere, dotted or not. The longest listed end of the name decides."""
    words = name.lower().replace("-", "_").replace(" ", "_").split(".")
    ends = (".".join(words[start:]) for start in range(len(words)))
    return next((SETTINGS[end] for end in ends if end in SETTINGS), ())


_COMMANDS = {
    "run": "train start go fit",
    "init": "new create quickstart",
    "explain": "describe",
    "resume": "continue restart",
    "check": "validate lint verify plan",
    "try": "test sample generate",
    "status": "state info show ps top watch errors issues health",
    "inspect": "log tail cat dump view",
    "audit": "count",
    "evaluate": "eval score benchmark",
    "weights": "checkpoints checkpoint model save",
    "plot": "graph curves dashboard tensorboard",
    "list": "runs ls",
    "delete": "rm remove",
    "drain": "stop end finish kill quit",
    "pause": "hold suspend",
    "unpause": "unhold",
    "experts": "demonstrations sft",
    "worker": "join",
    "studio": "report",
    "diff": "compare",
}

COMMANDS = {name: here for here, names in _COMMANDS.items() for name in names.split()} | {
    role.value: "worker" for role in RoleName
}
"""Name by which a command may be called -> the command here that does the same."""
