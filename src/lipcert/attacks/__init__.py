"""Attacks, and the judgement of certificates by them."""

from lipcert.attacks.judgement import (
    ON_SPHERE,
    check_certificates,
    cross_check,
    fooled,
)
from lipcert.attacks.searches import PAPER_STEP, Attacked, minimum_norm, pgd
from lipcert.certificate.certificates import take

__all__ = [
    "ON_SPHERE",
    "PAPER_STEP",
    "Attacked",
    "check_certificates",
    "cross_check",
    "fooled",
    "minimum_norm",
    "pgd",
    "take",
]
