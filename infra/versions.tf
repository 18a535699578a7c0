terraform {
  required_version = ">= 1.11.0" # locks of the state in S3 without a table

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "5.100.0"
    }
  }

  # Which bucket holds the state is said at init: terraform init -backend-config=backend.hcl
  backend "s3" {}
}
