terraform {
  required_version = ">= 1.9.0" # validation of one variable against another

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "5.100.0"
    }
  }

  # Which bucket holds the state is said at init: terraform init -backend-config=backend.hcl
  backend "s3" {}
}
