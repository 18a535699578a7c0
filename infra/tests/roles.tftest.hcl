# Which policy belongs to which role, and that other modules' names are those that policies say; no server, no
# credentials. What a policy allows is judged in tests/infra.

mock_provider "aws" {
  override_during = plan

  mock_resource "aws_sqs_queue" {
    defaults = { arn = "arn:aws:sqs:us-west-2:123456789012:relevance-dead-letter" }
  }
  mock_resource "aws_batch_job_definition" {
    defaults = { arn = "arn:aws:batch:us-west-2:123456789012:job-definition/relevance-mock:7" }
  }
}

variables {
  name               = "relevance"
  account_id         = "123456789012"
  region             = "us-west-2"
  bucket_arn         = "arn:aws:s3:::bucket"
  workspace_arn      = "arn:aws:s3:::bucket/relevance"
  key_arn            = "arn:aws:kms:us-west-2:123456789012:key/00000000-0000-0000-0000-000000000000"
  log_group_arn      = "arn:aws:logs:us-west-2:123456789012:log-group:/trnpipe/relevance"
  queue_arns         = ["arn:aws:batch:us-west-2:123456789012:job-queue/relevance-trainium", "arn:aws:batch:us-west-2:123456789012:job-queue/relevance-cpu"]
  schedule_queue_arn = "arn:aws:batch:us-west-2:123456789012:job-queue/relevance-cpu"
  share_identifier   = "production"
}

run "schedule" {
  command = plan

  variables {
    image              = "image@sha256:0000000000000000000000000000000000000000000000000000000000000000"
    settings_files     = []
    environment        = {}
    queue_arn          = var.schedule_queue_arn
    driver_role_arn    = "arn:aws:iam::123456789012:role/relevance-driver"
    scheduler_role_arn = "arn:aws:iam::123456789012:role/relevance-scheduler"
    expression         = "cron(0 2 * * ? *)"
    timezone           = "UTC"
    enabled            = false
    watch_expression   = "rate(1 hour)"
    attempts           = 2
    log_group          = "/trnpipe/relevance"
  }
  module {
    source = "./modules/schedule"
  }

  assert {
    condition     = aws_scheduler_schedule.this["driver"].state == "DISABLED" && aws_scheduler_schedule.this["watch"].state == "ENABLED"
    error_message = "a schedule that is switched off starts no cycle, and those that were started by hand are looked after"
  }
}

run "roles" {
  module {
    source = "./modules/roles"
  }

  assert {
    condition     = { for key, one in aws_iam_role.job : key => one.name } == { for key in ["driver", "embed", "promote", "report", "train"] : key => "relevance-${key}" }
    error_message = "the policy of the driver passes roles by these names"
  }
  assert {
    condition     = [output.driver_role_arn, output.train_role_arn, output.promote_role_arn, output.embed_role_arn, output.report_role_arn] == [for key in ["driver", "train", "promote", "embed", "report"] : aws_iam_role.job[key].arn]
    error_message = "an output names another role"
  }
  assert {
    condition     = alltrue([for one in aws_iam_role.job : jsondecode(one.assume_role_policy).Statement[0].Principal == { Service = "ecs-tasks.amazonaws.com" }])
    error_message = "somebody else may take a job's role on"
  }
  assert {
    condition     = jsondecode(aws_iam_role.scheduler.assume_role_policy).Statement[0].Condition.StringEquals["aws:SourceArn"] == "arn:aws:scheduler:us-west-2:123456789012:schedule-group/relevance"
    error_message = "schedules of another group may take the role on"
  }
  assert {
    condition     = alltrue([for key, one in aws_iam_role_policy.job : one.name == key]) && toset(keys(aws_iam_role_policy.job)) == toset(keys(aws_iam_role.job)) && toset(keys(aws_iam_role_policy.guard)) == toset(keys(aws_iam_role.job))
    error_message = "a role without its policy or without the guard"
  }
  # Policies differ by what only they may do, so a policy at the wrong role shows.
  assert {
    condition = (
      strcontains(aws_iam_role_policy.job["driver"].policy, "batch:SubmitJob")
      && strcontains(aws_iam_role_policy.job["train"].policy, "s3:::bucket/relevance/checkpoints/*")
      && strcontains(aws_iam_role_policy.job["promote"].policy, "s3:::bucket/relevance/cycles/*/evaluate/*")
      && strcontains(aws_iam_role_policy.job["embed"].policy, "s3:::bucket/relevance/embeddings/*")
      && strcontains(aws_iam_role_policy.job["report"].policy, "s3:::bucket/relevance/reports/*")
    )
    error_message = "a role has another role's policy"
  }
  assert {
    condition     = length(aws_iam_role_policy.data) == 0
    error_message = "rights on inputs that nobody named"
  }
  assert {
    condition = jsondecode(aws_iam_role_policy.job["driver"].policy).Statement[
      index(jsondecode(aws_iam_role_policy.job["driver"].policy).Statement[*].Sid, "DefineStages")
      ].Resource == flatten([for stage in ["prepare", "health", "compile", "mine", "teach", "train", "evaluate", "embed", "verify", "report", "run"] : [
        "arn:aws:batch:us-west-2:123456789012:job-definition/relevance-${stage}",
        "arn:aws:batch:us-west-2:123456789012:job-definition/relevance-${stage}:*"
    ]])
    error_message = "the driver may define other jobs than the stages and scripts"
  }
  # The scheduler's policy goes by names, so that the two modules need not wait for each other.
  assert {
    condition     = strcontains(aws_iam_role_policy.scheduler.policy, "\"arn:aws:sqs:us-west-2:123456789012:${run.schedule.dead_letter_name}\"")
    error_message = "the scheduler may write to another dead-letter queue than there is"
  }
  assert {
    condition     = strcontains(aws_iam_role.scheduler.assume_role_policy, "schedule-group/${run.schedule.group_name}\"")
    error_message = "the scheduler's role trusts another group of schedules than there is"
  }
  assert {
    condition     = alltrue([for key in [run.schedule.driver_schedule_name, run.schedule.watch_schedule_name] : strcontains(aws_iam_role_policy.scheduler.policy, "\"arn:aws:batch:us-west-2:123456789012:job-definition/${key}:*\"")])
    error_message = "the scheduler may not submit what the schedules name (a schedule has the name of its definition)"
  }
}

run "inputs_and_training_jobs" {
  command = plan

  variables {
    sagemaker       = true
    signing_key_arn = "arn:aws:kms:us-west-2:123456789012:key/22222222-2222-2222-2222-222222222222"
    data = [
      { bucket = "shop", prefix = "esci/2026", kms_key_arn = "arn:aws:kms:us-west-2:123456789012:key/11111111-1111-1111-1111-111111111111" },
      { bucket = "catalogue", prefix = "" },
    ]
  }
  module {
    source = "./modules/roles"
  }

  assert {
    condition     = toset(keys(aws_iam_role_policy.data)) == toset(flatten([for role in ["train", "promote", "embed"] : ["${role}-0", "${role}-1"]]))
    error_message = "other roles than the readers of inputs have rights on them"
  }
  assert {
    condition     = toset(keys(aws_iam_role_policy.data_key)) == toset(["train-0", "promote-0", "embed-0"])
    error_message = "a key is allowed where none was given, or the other way round"
  }
  assert {
    condition     = { for role, policy in aws_iam_role_policy.signing_key : role => strcontains(policy.policy, "kms:Sign") } == { promote = true, embed = false }
    error_message = "other roles than that of evaluate may sign models"
  }
  assert {
    condition     = jsondecode(aws_iam_role_policy.data["train-0"].policy).Statement[0].Resource == ["arn:aws:s3:::shop/esci/2026", "arn:aws:s3:::shop/esci/2026/*"] && jsondecode(aws_iam_role_policy.data["train-0"].policy).Statement[1].Condition.StringLike["s3:prefix"] == ["esci/2026", "esci/2026/*"]
    error_message = "rights on other objects than the input"
  }
  assert {
    condition     = jsondecode(aws_iam_role_policy.data["embed-1"].policy).Statement[0].Resource == ["arn:aws:s3:::catalogue/*"] && jsondecode(aws_iam_role_policy.data["embed-1"].policy).Statement[1].Condition.StringLike["s3:prefix"] == ["*"]
    error_message = "a whole bucket is not readable"
  }
  assert {
    condition     = alltrue([for kind, role in aws_iam_role.job : contains(jsondecode(role.assume_role_policy).Statement[*].Principal.Service, "sagemaker.amazonaws.com") == (kind != "driver")])
    error_message = "the driver is no training job, everything else may be one"
  }
}
