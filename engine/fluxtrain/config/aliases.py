"""Names that other programs have for our settings, and what to say where a value differs.

From transformers' TrainingArguments, TRL, peft, LLaMA-Factory, Axolotl, Unsloth and torchtune.
"""

from __future__ import annotations

_KEYS: dict[str, str] = {
    "model.path": "base_model model_name model_name_or_path pretrained_model_name_or_path "
    "model_id checkpoint_dir hf_model base_model_config model.name model.id",
    "model.revision": "model_revision revision_of_model base_model_revision",
    "model.trust_remote_code": "remote_code",
    "model.dtype": "bf16 fp16 fp32 tf32 torch_dtype precision half pure_bf16 float16 bfloat16",
    "model.kernels": "use_liger_kernel liger_kernel enable_liger_kernel liger",
    "data.path": "dataset datasets dataset_name dataset_path data_path train_file data_files "
    "train_data dataset_dir training_data",
    "data.held_out": "val_set_size val_size eval_split_ratio validation_split test_size "
    "validation_split_percentage",
    "data.held_out_path": "eval_dataset eval_data validation_file test_datasets val_file "
    "dataset_val val_dataset",
    "data.chat_template": "template chat_template_jinja prompt_template prompt_style",
    "data.sequence_length": "seq_length max_seq_length max_seq_len sequence_len cutoff_len "
    "max_length block_size context_length seq_len model_max_length tokenizer_max_seq_len",
    "data.columns": "dataset_text_field text_field text_column field_messages column_map",
    "data.format": "dataset_type dataset_format dataset_kind",
    "data.token_cache": "dataset_prepared_path tokenized_path cache_dir",
    "data.seed": "data_seed shuffle_seed",
    "method.name": "finetuning_type adapter adapter_type peft_type training_type "
    "load_in_4bit load_in_8bit quantization_bit use_lora use_peft qlora lora",
    "method.rank": "r lora_r lora_rank lora_dim",
    "method.alpha": "lora_alpha",
    "method.dropout": "lora_dropout",
    "method.targets": "target_modules lora_target lora_target_modules lora_target_linear "
    "lora_attn_modules",
    "method.variant": "use_dora use_rslora peft_use_dora peft_use_rslora",
    "method.base": "bnb_4bit_quant_type bnb_4bit_use_double_quant quantization double_quantization",
    "train.steps": "max_steps num_steps total_steps max_iters iterations max_train_steps",
    "train.epochs": "num_train_epochs num_epochs n_epochs max_epochs epoch",
    "train.batch_rows": "batch_size per_device_train_batch_size micro_batch_size "
    "train_batch_size per_gpu_batch_size device_batch_size train_micro_batch_size_per_gpu",
    "train.accumulation": "gradient_accumulation_steps grad_accum gradient_accumulation "
    "accumulate_grad_batches grad_accumulation_steps accumulation_steps",
    "train.learning_rate": "lr learningrate learning_rates max_lr peak_lr base_lr optimizer_lr",
    "train.schedule": "lr_scheduler_type lr_scheduler scheduler lr_schedule lr_scheduler_kwargs",
    "train.warmup_steps": "warmup warmup_ratio num_warmup_steps warmup_iters lr_warmup_steps",
    "train.weight_decay": "wd decay",
    "train.betas": "adam_beta1 adam_beta2 beta1 beta2 adam_betas",
    "train.eps": "adam_epsilon epsilon adam_eps",
    "train.states": "optim_bits adam8bit optimizer_8bit",
    "train.optimizer": "optim",
    "train.max_grad_norm": "clip_grad_norm grad_clip gradient_clip_val gradient_clipping "
    "max_norm clip grad_norm_clip",
    "train.seed": "random_state random_seed rng_seed",
    "train.evaluate_every": "eval_steps eval_interval eval_every evaluation_strategy "
    "eval_strategy evals_per_epoch val_check_interval evaluation_steps do_eval",
    "train.checkpoint_every": "save_steps save_interval save_strategy save_every "
    "saves_per_epoch checkpointing_steps save_every_n_steps checkpoint_interval",
    "train.keep_checkpoints": "save_total_limit keep_last_n_checkpoints max_checkpoints keep_last",
    "train.final_model": "load_best_model_at_end metric_for_best_model save_best best_model "
    "greater_is_better keep_best",
    "train.early_stopping_patience": "early_stopping patience early_stop early_stopping_steps",
    "train.early_stopping_threshold": "min_delta early_stopping_min_delta threshold",
    "samples.prompts": "sample_prompts eval_prompts eval_table_size",
    "samples.every": "sample_every sample_interval",
    "samples.max_new_tokens": "eval_max_new_tokens eval_table_max_new_tokens",
    "image.size": "image_size resolution max_area bucket_size",
    "image.caption_tokens": "max_sequence_length text_encoder_max_length",
    "image.caption_dropout": "caption_dropout_rate caption_dropout_prob cond_dropout",
    "image.timesteps": "weighting_scheme timestep_type timestep_sampling",
    "image.guidance": "guidance_scale guidance_embedding",
    "image.samples": "num_validation_images validation_images",
    "image.cache": "use_cache cache_latents cache_latents_to_disk vae_encoder_device "
    "text_encoder_device cache_text_embeddings",
    "trackers.report_to": "tracker loggers logger wandb tensorboard mlflow trackio "
    "use_wandb metric_logger log_with",
    "trackers.project": "wandb_project project_name mlflow_experiment_name trackio_project "
    "experiment_name experiment tracker_project_name",
    "trackers.name": "run_name wandb_name wandb_run_name wandb_run_id",
    "trackers.offline": "wandb_mode wandb_offline",
    "placement.offload": "deepspeed offload_optimizer offload_param "
    "fsdp_cpu_offload device_map zero_stage low_cpu_mem_usage",
    "placement.budget_gib": "max_memory gpu_memory_limit max_memory_mb gpu_memory_limit_gib",
    "placement.host_gib": "cpu_memory_limit max_cpu_memory cpu_mem_limit host_memory_limit",
    "placement.disk": "offload_to_disk disk_offload nvme_offload",
    "placement.disk_path": "nvme_path offload_folder offload_dir nvme_offload_dir swap_dir",
    "placement.device": "device_type use_cpu no_cuda accelerator",
    "parallel.cards": "num_gpus n_gpus gpus gpu_ids num_processes nproc_per_node world_size "
    "n_gpu devices num_devices gpus_per_node device_ids cuda_devices "
    "cuda_visible_devices visible_devices",
    "parallel.dealing": "pipeline_parallel_split tensor_split gpu_split split_points "
    "layers_per_gpu split_mode",
}

_SAYS: dict[str, str] = {  # what the name alone does not, after "did you mean KEY?"
    "warmup_ratio": "in steps, not as a share",
    "bf16": "as in model.dtype=bfloat16", "fp16": "as in model.dtype=float16",
    "load_in_4bit": "as in method.name=qlora",
    "load_in_8bit": "as in method.name=qlora with method.base=int8",
    "load_best_model_at_end": "as in train.final_model=best",
    "validation_split_percentage": "as a share, such as 0.05",
    "adam_beta1": "both in one, as in [0.9, 0.999]",
    "adam_beta2": "both in one, as in [0.9, 0.999]",
    "evals_per_epoch": "in steps", "saves_per_epoch": "in steps",
    "eval_strategy": "in steps, or end", "save_strategy": "in steps, or end",
    "evaluation_strategy": "in steps, or end",
    "use_dora": "as in method.variant=dora", "use_rslora": "as in method.variant=rslora",
    "lora_target_linear": "auto is all linear layers",
}  # fmt: skip

NOT_NEEDED: dict[str, str] = {  # names with no setting here, and what there is in place of it
    **dict.fromkeys(
        ("output_dir", "output_path", "save_dir", "out_dir", "output", "logging_dir"),
        "the run directory is named on the command line: --run-dir PATH",
    ),
    **dict.fromkeys(
        ("resume_from_checkpoint", "auto_resume_from_checkpoints", "resume"),
        "a run is resumed on the command line: --resume auto|PATH",
    ),
    **dict.fromkeys(
        ("gradient_checkpointing", "use_gradient_checkpointing",
         "enable_activation_checkpointing", "enable_activation_offloading"),
        "leave it out: the plan decides which blocks keep their activations",
    ),
    **dict.fromkeys(
        ("packing", "sample_packing", "pad_to_sequence_len", "group_by_length",
         "padding_free", "eval_sample_packing", "neat_packing"),
        "leave it out: rows are always packed, and documents in a row do not see each other",
    ),
    **dict.fromkeys(
        ("flash_attention", "flash_attn", "attn_implementation", "sdp_attention",
         "xformers_attention"),
        "leave it out: the model's fastest attention is taken",
    ),
    **dict.fromkeys(
        ("logging_steps", "log_every_n_steps", "logging_strategy", "log_interval", "log_steps",
         "logging_first_step"),
        "leave it out: each step is in the journal, and the console shows one every two seconds",
    ),
    **dict.fromkeys(
        ("train_on_inputs", "completion_only_loss", "assistant_only_loss", "train_on_input",
         "train_on_prompt", "mask_history"),
        "leave it out: of conversations only the assistant's words are trained on, and of "
        "prompts only the completions",
    ),
    **dict.fromkeys(
        ("num_workers", "dataloader_num_workers", "preprocessing_num_workers", "num_proc",
         "dataset_num_proc", "dataset_processes"),
        "leave it out: data is read and encoded by as many processors as there are",
    ),
    "do_train": "leave it out: `fluxtrain train` trains",
    "stage": "leave it out: supervised fine-tuning and pre-training are what there is",
    "compile": "leave it out: blocks run as they are",
    "torch_compile": "leave it out: blocks run as they are",
}  # fmt: skip

# by the last part of a key, or by the whole of it where it has a dot here
ALIASES: dict[str, str] = {name: key for key, names in _KEYS.items() for name in names.split()}


def said_of(name: str) -> str:
    """Return a note on a value that another program has under `name`; or ""."""
    return _SAYS.get(name, "")
