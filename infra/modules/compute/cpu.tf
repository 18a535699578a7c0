# Small work on Spot: the driver, preparing data, arrays of embedding jobs, reports. An interruption is retried.

resource "aws_launch_template" "cpu" {
  name_prefix = "${var.name}-cpu-"
  user_data   = local.user_data

  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  block_device_mappings {
    device_name = "/dev/xvda"

    ebs {
      volume_type           = "gp3"
      volume_size           = var.cpu.root_volume_gib
      encrypted             = true
      delete_on_termination = true
    }
  }
}

resource "aws_batch_compute_environment" "cpu" {
  compute_environment_name_prefix = "${var.name}-cpu-"
  type                            = "MANAGED"
  service_role                    = local.service_role

  compute_resources {
    type                = var.cpu.spot ? "SPOT" : "EC2"
    allocation_strategy = var.cpu.spot ? "SPOT_PRICE_CAPACITY_OPTIMIZED" : "BEST_FIT_PROGRESSIVE"
    instance_type       = var.cpu.instance_types
    min_vcpus           = 0
    max_vcpus           = var.cpu.max_vcpus
    subnets             = [var.subnet_id]
    security_group_ids  = [var.security_group_id]
    instance_role       = aws_iam_instance_profile.this.arn
    tags                = { Name = "${var.name}-cpu" }

    ec2_configuration {
      image_type = "ECS_AL2023"
    }

    launch_template {
      launch_template_id = aws_launch_template.cpu.id
      version            = aws_launch_template.cpu.latest_version
    }
  }

  update_policy {
    terminate_jobs_on_update      = false
    job_execution_timeout_minutes = 360 # the most that the provider takes
  }

  lifecycle {
    create_before_destroy = true
  }

  depends_on = [aws_iam_role_policy_attachment.service, aws_iam_role_policy_attachment.instance]
}
