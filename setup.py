"""Builds nothing yet; the CPU kernels are compiled from here when csrc/ arrives."""

from setuptools import setup

setup()
