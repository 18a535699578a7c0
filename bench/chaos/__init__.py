"""Cycles of jobs under random faults: do they end by retries alone, and is everything they leave right?"""
