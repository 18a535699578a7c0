locals {
  # Not confirmed on AWS that the list is complete: an instance that cannot join its cluster leaves jobs RUNNABLE.
  services = setunion(var.more_services, [
    "batch",         # the driver submits from inside
    "ecr.api",       # pulling images
    "ecr.dkr",       # pulling images; their layers come from S3
    "ecs",           # the agent of an instance
    "ecs-agent",     # the agent of an instance
    "ecs-telemetry", # the agent of an instance
    "logs",          # logs of jobs
    "sts",           # who am I
  ])
}

resource "aws_vpc_endpoint" "s3" {
  vpc_id            = aws_vpc.this.id
  service_name      = "com.amazonaws.${var.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [aws_route_table.nodes.id]

  tags = { Name = "${var.name}-s3" }
}

resource "aws_vpc_endpoint" "service" {
  for_each = local.services

  vpc_id              = aws_vpc.this.id
  service_name        = "com.amazonaws.${var.region}.${each.key}"
  vpc_endpoint_type   = "Interface"
  private_dns_enabled = true
  subnet_ids          = [aws_subnet.nodes.id]
  security_group_ids  = [aws_security_group.endpoints.id]

  tags = { Name = "${var.name}-${each.key}" }
}

resource "aws_security_group" "endpoints" {
  name        = "${var.name}-endpoints"
  description = "Interface endpoints; the nodes may call them"
  vpc_id      = aws_vpc.this.id

  tags = { Name = "${var.name}-endpoints" }
}

resource "aws_vpc_security_group_ingress_rule" "endpoints" {
  security_group_id            = aws_security_group.endpoints.id
  description                  = "HTTPS from the nodes"
  referenced_security_group_id = aws_default_security_group.nodes.id
  ip_protocol                  = "tcp"
  from_port                    = 443
  to_port                      = 443
}
