"""Inspection of published weights: survey, verification, differences."""
