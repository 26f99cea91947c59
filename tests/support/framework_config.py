"""What the integrations read of a job's config."""

from omegaconf import DictConfig, OmegaConf

_LIGHTNING = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
QUIET = dict.fromkeys(_LIGHTNING, False)
"""What a Trainer of Lightning's is given in a test."""
SILENT = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
"""And the arguments of one of transformers'."""


def framework_config(batch_size: int = 8, accumulation: int = 1, **training: object) -> DictConfig:
    """A checkpoint after every step; ``training`` has other keys and values of that group."""
    return OmegaConf.create(
        {
            "device": "cpu",
            "min_batch_size": 1,
            "num_gpus": 1,
            "seed": 3,
            "training": {
                "batch_size": batch_size,
                "gradient_accumulation_steps": accumulation,
                "epochs": 1,
                "num_workers": 0,
                "prefetch_factor": 2,
                "checkpoint_every_minutes": 60,
                "checkpoint_every_steps": 1,
                "keep_checkpoints": 20,
                "log_every_steps": 1,
                **training,
            },
        }
    )
