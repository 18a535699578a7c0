"""Where jobs run: this machine, AWS Batch or SageMaker. The one seam to each platform."""
