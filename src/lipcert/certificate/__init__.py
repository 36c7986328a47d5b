"""From bounds to certified radii."""

from lipcert.certificate.certificates import Certificates
from lipcert.certificate.certify import Certifier, certify
from lipcert.certificate.classifier import CertifiedClassifier
from lipcert.certificate.metric import CertifiedAccuracy
from lipcert.certificate.settled import SettledClassifier

__all__ = [
    "Certificates",
    "CertifiedAccuracy",
    "CertifiedClassifier",
    "Certifier",
    "SettledClassifier",
    "certify",
]
