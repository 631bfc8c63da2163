"""Presets of the algorithm: values for settings that the run file leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Shao et al. 2024, arXiv:2402.03300
    "grpo": {"aggregation": "sequence", "kl_loss_coef": 0.04, "kl_loss_type": "k3"},
    # Liu et al. 2025, arXiv:2503.20783
    "dr_grpo": {"normalize_std": False, "aggregation": "constant"},
    # Yu et al. 2025, arXiv:2503.14476; without its dynamic sampling
    "dapo": {"clip_ratio_high": 0.28, "aggregation": "token"},
    # Zheng et al. 2025, arXiv:2507.18071; the band is too narrow for the ratio to the engine's log-probs
    "gspo": {
        "loss_mode": "gspo",
        "clip_ratio_low": 3e-4,
        "clip_ratio_high": 4e-4,
        "aggregation": "sequence",
        "old_log_prob": "version_start",
    },
    # MiniMax 2025, arXiv:2506.13585, with the cap 5 of ScaleRL, arXiv:2510.13786
    "cispo": {"loss_mode": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 4.0, "aggregation": "token"},
    # Gao et al. 2025, arXiv:2511.20347
    "sapo": {"loss_mode": "sapo", "aggregation": "sequence"},
    # Qi et al. 2026, arXiv:2602.04879
    "dppo": {"loss_mode": "dppo_tv", "aggregation": "token"},
    # Ling team 2025, arXiv:2510.18855: bounds 0.5 and 5
    "icepop": {"loss_mode": "icepop", "clip_ratio_low": 0.5, "clip_ratio_high": 4.0, "aggregation": "token"},
    # Ahmadian et al. 2024, arXiv:2402.14740
    "rloo": {"adv_estimator": "rloo", "aggregation": "sequence_sum"},
    # Hu et al. 2025, arXiv:2501.03262
    "reinforce_pp": {"adv_estimator": "reinforce_plus_plus", "aggregation": "token"},
    "reinforce_pp_baseline": {"adv_estimator": "reinforce_plus_plus_baseline", "aggregation": "token"},
    # Chen et al. 2025, arXiv:2508.10751
    "pass_at_k": {"adv_estimator": "pass_at_k"},
    # Liu et al. 2026, arXiv:2601.05242
    "gdpo": {"adv_estimator": "gdpo"},
    # Fu et al. 2025, arXiv:2505.24298, with the cap of its code
    "areal": {"old_log_prob": "decoupled", "rollout_correction": {"rollout_is_threshold": 5.0}},
}


def with_preset(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `algorithm`, with those of the preset that they name where they have none."""
    filled = dict(settings)
    for name, value in PRESETS.get(str(settings.get("preset")), {}).items():
        own = filled.get(name)
        if isinstance(value, Mapping) and isinstance(own, Mapping):
            filled[name] = {**value, **own}
        else:
            filled.setdefault(name, value)
    return filled
