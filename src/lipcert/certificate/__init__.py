"""From bounds to certified radii."""

from lipcert.certificate.certify import Certificates, Certifier, certify
from lipcert.certificate.classifier import CertifiedClassifier

__all__ = ["Certificates", "CertifiedClassifier", "Certifier", "certify"]
