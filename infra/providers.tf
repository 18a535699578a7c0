# With var.emulator the endpoint comes from AWS_ENDPOINT_URL in the environment.
provider "aws" {
  region = var.region

  skip_credentials_validation = var.emulator
  skip_metadata_api_check     = var.emulator
  s3_use_path_style           = var.emulator
  max_retries                 = var.emulator ? 4 : null # for a connection that breaks; a call that an emulator lacks it lacks at the 25th try, too

  default_tags {
    tags = { pipeline = var.name }
  }
}
