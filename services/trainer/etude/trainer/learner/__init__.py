"""Learner ranks: datasets, batches, objectives, optimiser steps, state."""
