resource "aws_cloudwatch_log_group" "flow" {
  #checkov:skip=CKV_AWS_338: how long is the operator's to say (log_retention_days); it is read when an instance does not join
  name              = "/${var.name}/flow"
  retention_in_days = var.log_retention_days
  kms_key_id        = var.key_arn
}

resource "aws_flow_log" "this" {
  vpc_id          = aws_vpc.this.id
  traffic_type    = "REJECT" # what is refused explains a node that cannot join; all traffic of a multi-node job would cost more than it tells
  log_destination = aws_cloudwatch_log_group.flow.arn
  iam_role_arn    = aws_iam_role.flow.arn
}

resource "aws_iam_role" "flow" {
  name        = "${var.name}-flow-logs"
  description = "Writes the flow logs of the VPC"

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = "vpc-flow-logs.amazonaws.com" }
      Action    = "sts:AssumeRole"
      Condition = { StringEquals = { "aws:SourceAccount" = var.account_id } }
    }]
  })
}

resource "aws_iam_role_policy" "flow" {
  name = "write"
  role = aws_iam_role.flow.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect   = "Allow"
      Action   = ["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"]
      Resource = "${aws_cloudwatch_log_group.flow.arn}:*"
    }]
  })
}
