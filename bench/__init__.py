"""The measured claims: one script each, results as JSON with the machine they were measured on."""
