# What both kinds of instances share. Their role lets the ECS agent work and nothing else: single-node jobs run on the
# host's network and can reach the instance's credentials; data is for the roles of jobs.

locals {
  # AWS Batch adds a part of its own, so it has to be MIME. Errors in it would not keep an instance from joining.
  user_data = base64encode(templatefile("${path.module}/user_data.mime.tftpl", { stop_timeout_s = var.stop_timeout_s }))
}

resource "aws_iam_role" "instance" {
  name        = "${var.name}-instance"
  description = "The ECS agent on instances of AWS Batch"

  assume_role_policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [{ Effect = "Allow", Principal = { Service = "ec2.amazonaws.com" }, Action = "sts:AssumeRole" }]
  })
}

resource "aws_iam_role_policy_attachment" "instance" {
  role       = aws_iam_role.instance.name
  policy_arn = "arn:aws:iam::aws:policy/service-role/AmazonEC2ContainerServiceforEC2Role"
}

resource "aws_iam_instance_profile" "this" {
  name = "${var.name}-instance"
  role = aws_iam_role.instance.name
}
