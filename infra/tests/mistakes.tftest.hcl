# Mistakes are refused before anything is planned. Each by itself, and what it is told: tests/infra/test_variables.py.

mock_provider "aws" {
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
}

variables {
  name              = "relevance"
  region            = "us-west-2"
  availability_zone = "us-west-2d"
  image             = "123456789012.dkr.ecr.us-west-2.amazonaws.com/relevance@sha256:0000000000000000000000000000000000000000000000000000000000000000"
  cpu_image         = "123456789012.dkr.ecr.us-west-2.amazonaws.com/relevance@sha256:0000000000000000000000000000000000000000000000000000000000000000"
  ami_id            = "ami-0123456789abcdef0"
  quota_vcpus       = 512
  budget_usd        = 20000
  notify_emails     = ["search-platform@example.com"]
}

run "seeded_mistakes" {
  command = plan

  variables {
    shares              = { production = 0, prod-1 = 1 } # weight 0, a hyphen
    driver_attempts     = 11
    max_nodes           = 5  # 640 vCPU
    efa_interfaces      = 7  # trn1.32xlarge has 8
    ami_id              = "" # the newest one cannot run the container
    image               = "123456789012.dkr.ecr.us-west-2.amazonaws.com/relevance:latest"
    schedule_expression = "cron(0 2 31 2 ? *)" # 31 February
  }

  expect_failures = [
    var.shares,
    var.driver_attempts,
    var.max_nodes,
    var.efa_interfaces,
    var.ami_id,
    var.image,
    var.schedule_expression,
  ]
}

run "a_share_that_is_not_listed" {
  command = plan

  variables {
    share_identifier = "nightly"
  }

  expect_failures = [var.share_identifier]
}
