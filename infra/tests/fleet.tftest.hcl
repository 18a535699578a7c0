# The whole stack, planned without an account: what is known before anything is made.

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
  cpu_image         = "123456789012.dkr.ecr.us-west-2.amazonaws.com/relevance@sha256:1111111111111111111111111111111111111111111111111111111111111111"
  ami_id            = "ami-0123456789abcdef0"
  quota_vcpus       = 512
  budget_usd        = 20000
  notify_emails     = ["search-platform@example.com"]
}

run "settings_and_fleet_are_known_before_anything_is_made" {
  command = plan

  variables {
    timezone = "Europe/Berlin"
    sla_s    = 3600
  }

  assert {
    condition     = output.settings.workspace == "s3://relevance-123456789012-us-west-2/relevance"
    error_message = "workspace ${output.settings.workspace}"
  }

  assert {
    condition     = output.settings.jobs.queue == "relevance-trainium" && output.settings.jobs.share_identifier == "production"
    error_message = "cycles belong on the Trainium queue, in the share production"
  }

  assert {
    condition = alltrue([for stage in ["prepare", "mine", "teach", "embed", "verify", "report"] :
      output.settings.jobs[stage].queue == "relevance-cpu" && output.settings.jobs[stage].image == var.cpu_image
    ])
    error_message = "work without Trainium belongs on the CPU queue, with the CPU image"
  }

  assert {
    condition     = output.fleet[0].max_vcpus == 512 && output.fleet[0].type == "EC2" && one(output.fleet[0].instance_types) == "trn1.32xlarge"
    error_message = "four trn1.32xlarge are 512 vCPU, on demand"
  }

  assert {
    condition     = output.fleet[1].type == "SPOT" && join(" ", output.fleet[1].shares) == "backfills experiments production"
    error_message = "CPU machines are Spot, with the same shares"
  }

  # The driver gets the settings as variables.
  assert {
    condition = local.environment["TRNPIPE_WORKSPACE"] == output.settings.workspace && alltrue([for name, value in {
      TRNPIPE_JOBS__QUEUE              = "relevance-trainium"
      TRNPIPE_JOBS__IMAGE              = var.image
      TRNPIPE_JOBS__SLA_S              = "3600"
      TRNPIPE_JOBS__EMBED__IMAGE       = var.cpu_image
      TRNPIPE_JOBS__EMBED__QUEUE       = "relevance-cpu"
      TRNPIPE_JOBS__SCHEDULE__TIMEZONE = "Europe/Berlin"
      TRNPIPE_JOBS__ENVIRONMENT        = jsonencode({ AWS_DEFAULT_REGION = "us-west-2" })
      AWS_DEFAULT_REGION               = "us-west-2"
    } : local.environment[name] == value])
    error_message = "the environment of the driver is not that of the settings: ${join(", ", keys(local.environment))}"
  }

  assert {
    condition     = contains(keys(local.environment), "TRNPIPE_JOBS__EVALUATE__ROLE") && !anytrue([for name in keys(local.environment) : startswith(name, "TRNPIPE_TRAIN")])
    error_message = "the job that promotes has a role of its own, and how to train is not for Terraform to say"
  }

  assert {
    condition     = length(module.sagemaker) == 0 && !contains(keys(output.settings.jobs), "sagemaker")
    error_message = "nobody has asked for SageMaker"
  }

  assert {
    condition     = !contains(keys(module.network.endpoints), "sagemaker.api") && !contains(keys(module.network.endpoints), "kms")
    error_message = "an endpoint that nobody needs is paid for"
  }
}

run "embedding_on_trainium_and_training_jobs_of_sagemaker" {
  command = plan

  variables {
    embed_on_trainium = true
    sagemaker         = true
    signing_key_arn   = "arn:aws:kms:us-west-2:123456789012:key/22222222-2222-2222-2222-222222222222"
    settings_files    = ["configs/base.toml", "configs/jobs/trn1.toml", "configs/jobs/embed-trn1.toml"]
  }

  assert {
    condition     = keys(output.settings.jobs.embed) == ["role"] && output.settings.jobs.verify.queue == "relevance-cpu"
    error_message = "embed goes where cycles go, verify stays on CPU machines: ${jsonencode(output.settings.jobs.embed)}"
  }

  assert {
    condition     = length(setsubtract(["sagemaker.api", "kms", "batch"], keys(module.network.endpoints))) == 0
    error_message = "the watch asks SageMaker, and evaluate KMS, from a subnet without a way to the internet"
  }

  assert {
    condition     = module.sagemaker[0].log_group == "/aws/sagemaker/TrainingJobs" && length(output.settings.jobs.sagemaker.subnets) == 1 && !contains(keys(output.settings.jobs.sagemaker), "queue")
    error_message = "training jobs in another network, or through a queue that nobody asked for"
  }
}
