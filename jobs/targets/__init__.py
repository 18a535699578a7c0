"""Where jobs run: this machine, AWS Batch or SageMaker."""
