# One role for each kind of job. Who may do what is in policies/*.json.tftpl, which tests/infra renders and judges too;
# nothing is decided here but which policy belongs to which role.

locals {
  jobs    = toset(["driver", "train", "promote", "embed", "report"])
  readers = ["train", "promote", "embed"] # of the data inputs: prepare, the catalogue of evaluate, embed and verify

  definitions = "arn:aws:batch:${var.region}:${var.account_id}:job-definition/${var.name}"
  values = {
    name               = var.name
    account_id         = var.account_id
    region             = var.region
    bucket_arn         = var.bucket_arn
    workspace_arn      = var.workspace_arn
    workspace_prefix   = var.name
    key_arn            = var.key_arn
    log_group_arn      = var.log_group_arn
    queue_arns         = jsonencode(var.queue_arns)
    schedule_queue_arn = var.schedule_queue_arn
    share_identifier   = var.share_identifier
    definitions        = local.definitions
    # RegisterJobDefinition is asked for the name, SubmitJob for a revision of it.
    stage_definitions = jsonencode(flatten([
      for stage in jsondecode(file("${path.module}/stages.json")) :
      ["${local.definitions}-${stage}", "${local.definitions}-${stage}:*"]
    ]))
  }

  data = {
    for pair in setproduct(local.readers, range(length(var.data))) : "${pair[0]}-${pair[1]}" => {
      role  = pair[0]
      input = var.data[pair[1]]
    }
  }
  encrypted_data = { for name, one in local.data : name => one if one.input.kms_key_arn != null }
}

resource "aws_iam_role" "job" {
  for_each = local.jobs

  name               = "${var.name}-${each.key}"
  description        = "Rights of the ${each.key} jobs of pipeline ${var.name}."
  assume_role_policy = templatefile("${path.module}/policies/trust-${var.sagemaker && each.key != "driver" ? "training" : "tasks"}.json.tftpl", local.values)
}

resource "aws_iam_role_policy" "job" {
  for_each = local.jobs

  name   = each.key
  role   = aws_iam_role.job[each.key].id
  policy = templatefile("${path.module}/policies/${each.key}.json.tftpl", local.values)
}

# Said apart, so that it holds for whatever else is ever attached to these roles.
resource "aws_iam_role_policy" "guard" {
  for_each = local.jobs

  name   = "guard"
  role   = aws_iam_role.job[each.key].id
  policy = templatefile("${path.module}/policies/guard.json.tftpl", local.values)
}

resource "aws_iam_role_policy" "data" {
  for_each = local.data

  name = "data-${each.key}"
  role = aws_iam_role.job[each.value.role].id
  policy = templatefile("${path.module}/policies/data.json.tftpl", {
    bucket_arn = "arn:aws:s3:::${each.value.input.bucket}"
    # Both: a path is first asked for as a file, and then listed as a folder.
    objects = jsonencode([
      for key in(each.value.input.prefix == "" ? ["*"] : [each.value.input.prefix, "${each.value.input.prefix}/*"]) :
      "arn:aws:s3:::${each.value.input.bucket}/${key}"
    ])
    prefixes = jsonencode(
      each.value.input.prefix == "" ? ["*"] : [each.value.input.prefix, "${each.value.input.prefix}/*"]
    )
  })
}

resource "aws_iam_role_policy" "data_key" {
  for_each = local.encrypted_data

  name = "data-key-${each.key}"
  role = aws_iam_role.job[each.value.role].id
  policy = templatefile("${path.module}/policies/data-key.json.tftpl", {
    key_arn = each.value.input.kms_key_arn
    region  = var.region
  })
}

resource "aws_iam_role_policy" "signing_key" {
  for_each = var.signing_key_arn == null ? {} : { promote = "sign", embed = "verify" }

  name   = "signing-key"
  role   = aws_iam_role.job[each.key].id
  policy = templatefile("${path.module}/policies/${each.value}.json.tftpl", { signing_key_arn = var.signing_key_arn })
}

resource "aws_iam_role" "scheduler" {
  name               = "${var.name}-scheduler"
  description        = "Lets the schedules of pipeline ${var.name} start its driver."
  assume_role_policy = templatefile("${path.module}/policies/trust-scheduler.json.tftpl", local.values)
}

resource "aws_iam_role_policy" "scheduler" {
  name   = "scheduler"
  role   = aws_iam_role.scheduler.id
  policy = templatefile("${path.module}/policies/scheduler.json.tftpl", local.values)
}
