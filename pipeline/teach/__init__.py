"""Compute the vectors or scores of a larger model, the teacher, which the loss compares with those of the student."""
