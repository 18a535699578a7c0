"""The local engine: the jobs of a cycle as processes of this machine, with the semantics of AWS Batch."""
