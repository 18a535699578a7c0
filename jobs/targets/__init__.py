"""Where jobs run: this machine or AWS Batch. The one seam to each platform."""
