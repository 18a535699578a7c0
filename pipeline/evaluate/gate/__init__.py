"""The promotion gate: may a candidate replace the production model?"""
