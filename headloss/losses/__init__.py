"""Loss terms of the library and the decorator `term`, which defines new terms without logits."""

from .covariance import clip_cov, kl_cov
from .distillation import distillation, on_policy_distillation, sdar
from .draft import draft_weights, dspark, lk_alpha, lk_hybrid, nla
from .fipo import fipo
from .kl import kl
from .modifiers import Modifier
from .policy import bnpo, dapo, dr_grpo, grpo, gspo, gspo_token, luspo, ppo
from .preference import cpo, dpo, ipo, orpo, simpo
from .preference_unpaired import a2po, aot, kto
from .proximal import dppo, dro, icepop, vaco
from .real import real
from .reinforce import cispo, reinforce, topr, vespo
from .rejection import rejection_mask
from .scalar_heads import bradley_terry, classification, value_loss
from .score_centering import score_centering
from .second_moment import second_moment_mask
from .shaped import kl_shaped, rlsd_shaped
from .supervised import (
    any_of,
    chord_phi,
    cross_entropy,
    dft,
    eaft,
    entropy,
    focal,
    soft_cross_entropy,
    unlikelihood,
    z_loss,
)
from .surrogates import aspo, ce_gppo, gmpo, sapo
from .teacher import teacher
from .term import Objective, Term, term

__all__ = [
    "Term",
    "Objective",
    "Modifier",
    "term",
    "teacher",
    "cross_entropy",
    "z_loss",
    "entropy",
    "unlikelihood",
    "dft",
    "chord_phi",
    "eaft",
    "focal",
    "soft_cross_entropy",
    "any_of",
    "grpo",
    "gspo",
    "gspo_token",
    "dapo",
    "bnpo",
    "dr_grpo",
    "luspo",
    "ppo",
    "cispo",
    "reinforce",
    "score_centering",
    "sapo",
    "gmpo",
    "vespo",
    "topr",
    "dppo",
    "icepop",
    "vaco",
    "dro",
    "ce_gppo",
    "aspo",
    "fipo",
    "real",
    "clip_cov",
    "kl_cov",
    "kl",
    "dpo",
    "ipo",
    "simpo",
    "cpo",
    "orpo",
    "kto",
    "aot",
    "a2po",
    "distillation",
    "nla",
    "lk_alpha",
    "lk_hybrid",
    "dspark",
    "draft_weights",
    "on_policy_distillation",
    "sdar",
    "kl_shaped",
    "rlsd_shaped",
    "rejection_mask",
    "second_moment_mask",
    "value_loss",
    "bradley_terry",
    "classification",
]
