# On AWS the service-linked role serves: with another one the instances of an environment cannot be updated. The
# emulator insists on a role.

locals {
  service_role = var.emulator ? aws_iam_role.service[0].arn : null
}

resource "aws_iam_role" "service" {
  count = var.emulator ? 1 : 0

  name        = "${var.name}-service"
  description = "AWS Batch, in the emulator"

  assume_role_policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [{ Effect = "Allow", Principal = { Service = "batch.amazonaws.com" }, Action = "sts:AssumeRole" }]
  })
}

resource "aws_iam_role_policy_attachment" "service" {
  count = var.emulator ? 1 : 0

  role       = aws_iam_role.service[0].name
  policy_arn = "arn:aws:iam::aws:policy/service-role/AWSBatchServiceRole"
}
