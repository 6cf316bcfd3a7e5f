"""Replay of recorded optimiser steps."""
