# Trainium on demand, or from a capacity block. Spot is not possible: AWS Batch runs no multi-node job on it.

locals {
  # A launch template that lists interfaces and a compute environment with groups exclude each other; the interfaces
  # carry the group then, and the interfaces of multi-node jobs take the VPC's default group, which is the same one.
  # The emulator cannot make a compute environment without groups.
  trainium_groups = var.efa_interfaces == 0 || var.emulator ? [var.security_group_id] : null

  # One switch for all nodes. A capacity block has its own; the emulator knows no placement groups.
  placement_group = var.efa_interfaces > 0 && var.capacity_block_id == "" && !var.emulator
}

resource "aws_placement_group" "trainium" {
  count = local.placement_group ? 1 : 0

  name     = "${var.name}-trainium"
  strategy = "cluster"
}

resource "aws_launch_template" "trainium" {
  name_prefix = "${var.name}-trainium-"
  user_data   = local.user_data

  # No public address is asked for: AWS refuses that for an instance with several interfaces.
  dynamic "network_interfaces" {
    for_each = range(var.efa_interfaces)

    content {
      interface_type        = "efa"
      network_card_index    = network_interfaces.value
      device_index          = network_interfaces.value == 0 ? 0 : 1
      security_groups       = [var.security_group_id]
      delete_on_termination = true
    }
  }

  dynamic "instance_market_options" {
    for_each = var.capacity_block_id == "" ? [] : [var.capacity_block_id]

    content {
      market_type = "capacity-block"
    }
  }

  dynamic "capacity_reservation_specification" {
    for_each = var.capacity_block_id == "" ? [] : [var.capacity_block_id]

    content {
      capacity_reservation_target {
        capacity_reservation_id = capacity_reservation_specification.value
      }
    }
  }

  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  block_device_mappings {
    device_name = "/dev/xvda"

    ebs {
      volume_type           = "gp3"
      volume_size           = var.root_volume_gib
      throughput            = 1000 # MiB/s; at gp3's own 125 a machine unpacks the image for minutes, at its full price
      iops                  = 6000
      encrypted             = true # with the account's key for EBS: another one would need a grant to the fleet
      delete_on_termination = true
    }
  }
}

resource "aws_batch_compute_environment" "trainium" {
  compute_environment_name_prefix = "${var.name}-trainium-"
  type                            = "MANAGED"
  service_role                    = local.service_role

  compute_resources {
    type                = "EC2"
    allocation_strategy = "BEST_FIT_PROGRESSIVE" # with BEST_FIT an environment can only be replaced, not updated
    instance_type       = [var.instance_type]
    min_vcpus           = 0
    max_vcpus           = var.max_vcpus
    subnets             = [var.subnet_id]
    security_group_ids  = local.trainium_groups
    instance_role       = aws_iam_instance_profile.this.arn
    placement_group     = local.placement_group ? aws_placement_group.trainium[0].name : null
    tags                = { Name = "${var.name}-trainium" }

    # The image type for trn1 is AL2023, which has no Neuron driver; the image takes its place.
    ec2_configuration {
      image_type        = "ECS_AL2023"
      image_id_override = var.ami_id
    }

    launch_template {
      launch_template_id = aws_launch_template.trainium.id
      version            = aws_launch_template.trainium.latest_version # a number, so that a new version is an update
    }
  }

  update_policy {
    terminate_jobs_on_update      = false
    job_execution_timeout_minutes = 360 # the most that the provider takes: change the image between cycles
  }

  lifecycle {
    create_before_destroy = true # a queue holds on to it
  }

  depends_on = [aws_iam_role_policy_attachment.service, aws_iam_role_policy_attachment.instance]
}
