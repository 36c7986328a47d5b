"""From bounds to certified radii."""

from lipcert.certificate.certificates import Certificates
from lipcert.certificate.certify import Certifier, certify
from lipcert.certificate.classifier import CertifiedClassifier

__all__ = ["Certificates", "CertifiedClassifier", "Certifier", "certify"]
