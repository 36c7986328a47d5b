"""The version of lipcert."""

VERSION = "0.1.0"
