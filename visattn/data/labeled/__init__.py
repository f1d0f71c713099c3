"""Labeled pictures to train and test on."""
