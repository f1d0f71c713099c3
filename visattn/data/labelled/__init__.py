"""Labelled pictures to train and test on."""
